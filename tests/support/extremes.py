"""Values at and beyond what any number of a request may be."""

NUMBERS = [
    0, -0.0, 5e-324, 1e-300, 1e-46, 1e-40, 1e-7, 1e-3, 0.5, 1, 1.0, 7, 4096, 2**31 - 1, 2**31,
    2**32, 2**63, 2**64, 1e30, 3.5e38, 1e308, -1, -1e-300, -1e308, -(2**31), -(2**63),
    10**40, 10**400, -(10**400), 10**5000, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
OTHERS = [True, False, "", "1", "x" * 10_000, [], [1], {}, {"a": 1}, (1,), b"1", 1j, object()]
EVERYTHING = NUMBERS + OTHERS
MOST_CHARACTERS = 400  # of an error's message
