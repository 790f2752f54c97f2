"""What a Hopper GPU has for one CTA (a block of threads), and the widest of its operations."""

SHARED_MEMORY = 227 * 1024  # bytes
BUFFERS = SHARED_MEMORY - 2048  # bytes that barriers and padding leave
WIDEST = 256  # rows of a TMA box and columns of a wgmma
