"""The requests of a campaign: each is made from the seed and its number alone."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
import urllib.parse
import zlib
from collections.abc import Mapping
from typing import Any

from support.fuzz import asks, bodies, hostile_http, wire

JSON = {"Content-Type": "application/json"}
OK = frozenset({200, 503})
MOST_CHOICES = 68  # what may run and wait in the server of `process`
# Places are counted before most fields are looked at: a full queue is told first.
REFUSED = frozenset({400, 413, 503})
ANY = frozenset({200, 400, 413, 503})

GET_PATHS = (
    "/health", "/ready", "/readyz", "/livez", "/ping", "/version", "/v1/models", "/model_info",
    "/get_model_info", "/server_info", "/get_server_info", "/v1/loads", "/get_load", "/metrics",
    "/v1/loads?include=core,memory", "/v1/loads?format=prometheus", "/api/tags", "/api/ps",
    "/", "/api/version", "/docs", "/openapi.json", "/health_generate",
)  # fmt: skip
POST_PATHS = (*asks.ROUTES, "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize",
              "/abort_request", "/api/show", "/start_profile")  # fmt: skip
ODD_QUERIES = (
    "?",
    "?a=b&a=c",
    "?%00=%ff",
    "?timeout=1",
    "?include=%0a",
    "?" + "a" * 3000,
    "?format[]=1",
)
BAD_GETS = {
    "/v1/loads?dp_rank=1": "dp_rank",
    "/v1/loads?dp_rank=x": "dp_rank",
    "/v1/loads?dp_rank=" + "9" * 5000: "dp_rank",
    "/v1/loads?include=%0a%1b[31m": "include",
    "/v1/loads?format=%ff": "format",
}
MISSING = (
    "/v1", "/v1/", "/v1/chat/completions/", "/v1/embeddings", "/api", "/api/pull", "/metrics//",
    "/../etc/passwd", "/v1/models/another", "/v1/models/%0a%1b", "/%2e%2e/",
    "/v1/models/" + "m" * 9000, "/health%00", "/HEALTH", "//health", "/generate?/",
)  # fmt: skip
METHODS = (
    "GET",
    "HEAD",
    "OPTIONS",
    "PUT",
    "PATCH",
    "DELETE",
    "TRACE",
    "PROPFIND",
    "get",
    "X" * 200,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One request, and what its answer must be.

    `ask` is the question that it asks, if it is served: then its choices are known. A 400 must
    name one of the fields `params`. `leaves_after` is the number of bytes of the answer after
    which the client goes, `aborts` the request that it ends instead. `sent` replaces all of it by
    bytes on a connection of its own.
    """

    kind: str
    method: str = "POST"
    path: str = ""
    body: bytes = b""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    statuses: frozenset[int] = ANY
    params: tuple[str, ...] = ()
    ask: asks.Ask | None = None
    asked: asks.Asked | None = None
    leaves_after: int | None = None
    aborts: str | None = None
    sent: hostile_http.Sent | None = None

    def raw(self) -> bytes:
        return wire.request_bytes(self.method, self.path, self.body, self.headers)


class Maker:
    """Makes cases; `prompt_ids` are the tokens of each question, `key` goes with every request.

    `names` are ids of requests that others have begun: nobody may end those.
    """

    def __init__(
        self,
        seed: int,
        prompt_ids: Mapping[asks.Ask, list[int]],
        *,
        key: str,
        names: tuple[str, ...] = (),
    ):
        self._seed = seed
        self._prompt_ids = prompt_ids
        self._auth = {"Authorization": f"Bearer {key}"}
        self._names = names
        self._makers = {
            self._valid: 20, self._wrong_field: 25, self._damaged: 10, self._no_object: 8,
            self._twice: 4, self._anything: 8, self._large: 2, self._leaves: 3, self._http: 8,
            self._get: 6, self._missing: 4, self._abort: 4, self._tokens: 4, self._keys: 2,
            self._headers: 3, self._many: 0.3, self._aborted: 2, self._compressed: 4,
        }  # fmt: skip

    def case(self, number: int) -> Case:
        """Returns the case of that number."""
        rng = random.Random(f"{self._seed}/{number}")
        (make,) = rng.choices([*self._makers], weights=[*self._makers.values()])
        found = make(rng)
        headers = found.headers if "Authorization" in found.headers else self._auth | found.headers
        return dataclasses.replace(found, headers=headers)

    def _asked(self, rng: random.Random, routes=asks.ROUTES) -> tuple[asks.Ask, asks.Asked]:
        (ask,) = rng.choices(asks.ASKS, asks.WEIGHTS)
        possible = [route for route in ask.routes if route in routes]
        if not possible:
            return self._asked(rng, routes)
        return ask, asks.wrap(ask, rng.choice(possible), rng, self._prompt_ids[ask])

    def _body(self, rng: random.Random) -> tuple[str, dict[str, Any]]:
        _, asked = self._asked(rng)
        return asked.path, asked.body

    def _valid(self, rng: random.Random) -> Case:
        ask, asked = self._asked(rng)
        body = asked.body if rng.random() < 0.8 else bodies.in_floats(asked.body)
        path = asked.path + rng.choice(["", "", "", "/"])
        return Case(
            kind="valid", path=path, body=bodies.dumps(body), headers=JSON, statuses=OK, ask=ask,
            asked=asked,
        )  # fmt: skip

    def _compressed(self, rng: random.Random) -> Case:
        """A body that is compressed, or was: some are damaged, in parts that mean nothing, too."""
        ask, asked = self._asked(rng)
        names = ["gzip", "x-gzip", "deflate", "br", "gzip, gzip", ""]
        name, encode = rng.choice(names), rng.choice([_gzipped, zlib.compress])
        raw = encode(bodies.dumps(asked.body))
        is_right = (encode is _gzipped) == name.endswith("gzip") and "," not in name
        if is_right and name in names[:3] and rng.random() < 0.5:
            return Case(
                kind="compressed", path=asked.path, body=raw, statuses=OK, ask=ask, asked=asked,
                headers=JSON | {"Content-Encoding": name},
            )  # fmt: skip
        bomb = encode(b"[" * rng.choice([10**4, 10**6, 10**7]))
        return Case(
            kind="compressed", path=asked.path, headers=JSON | {"Content-Encoding": name},
            body=rng.choice([bodies.damaged(raw, rng), raw[:-1], raw + raw, bomb]),
            statuses=ANY | {415},
        )  # fmt: skip

    def _wrong_field(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        if path == asks.TEXT and rng.random() < 0.9:
            body.pop("echo", None)
        wrong, name = bodies.with_wrong_field(path, body, rng)
        # Choices are counted first, prompts times n; two limits may only be the same one.
        others = {"n": ("prompt", "text", "input_ids"), "max_tokens": ("max_completion_tokens",)}
        named = (name[:80], *others.get(name.rpartition(".")[2], ()))
        return Case(
            kind="wrong field", path=path, body=bodies.dumps(wrong), headers=JSON,
            statuses=REFUSED, params=named,
        )  # fmt: skip

    def _damaged(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        raw = bodies.damaged(bodies.dumps(body), rng)
        return Case(kind="damaged", path=path, body=raw, headers=JSON)

    def _no_object(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        raw = bodies.without_object(body, rng)
        return Case(kind="no object", path=path, body=raw, headers=JSON, statuses=REFUSED)

    def _twice(self, rng: random.Random) -> Case:
        ask, asked = self._asked(rng)
        raw = bodies.with_field_twice(asked.body, rng)
        return Case(
            kind="field twice", path=asked.path, body=raw, headers=JSON, statuses=OK, ask=ask,
            asked=asked,
        )  # fmt: skip

    def _anything(self, rng: random.Random) -> Case:
        path = rng.choice(POST_PATHS[:-1])
        if rng.random() < 0.3 or path not in asks.ROUTES:
            names = ("prompt", "messages", "text", "input", "tokens", "model", "rid", "tools")
            body: Any = {rng.choice(names): bodies.anything(rng) for _ in range(3)}
        else:
            _, asked = self._asked(rng, (path,))
            name = rng.choice([*asked.body, *bodies.FIELDS[path]]).rpartition(".")[2]
            body = asked.body | {name: bodies.anything(rng)}
        return Case(
            kind="anything", path=path, body=bodies.dumps(body), headers=JSON, statuses=ANY | {404}
        )

    def _large(self, rng: random.Random) -> Case:
        path = rng.choice(POST_PATHS[:-1])
        names = ["prompt", "messages", "text", "input", "tokens", "rid", "stop", "zzz", "dllm", "n"]
        body: dict[str, Any] = {"max_tokens": 1}
        if path in asks.ROUTES:
            _, asked = self._asked(rng, (path,))
            body, names = asked.body, [*names, *asked.body]
        body |= {rng.choice([*names, "k" * 100_000]): bodies.large(rng)}
        return Case(
            kind="large", path=path, body=bodies.dumps(body), headers=JSON, statuses=ANY | {404}
        )

    def _leaves(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        body["stream"] = rng.random() < 0.8 or "stream_options" in body
        return Case(
            kind="leaves", path=path, body=bodies.dumps(body), headers=JSON, statuses=OK,
            leaves_after=rng.choice([0, 1, 200, 1000]),
        )  # fmt: skip

    def _aborted(self, rng: random.Random) -> Case:
        """A stream that its own client ends through /abort_request."""
        ask, asked = self._asked(rng, (asks.CHAT, asks.TEXT, asks.GENERATE, asks.RESPONSES))
        body = asked.body | {"stream": True, "rid": f"aborted {rng.getrandbits(64)}"}
        return Case(
            kind="aborted", path=asked.path, body=bodies.dumps(body), headers=JSON, statuses=OK,
            ask=ask, asked=dataclasses.replace(asked, body=body), aborts=body["rid"],
        )  # fmt: skip

    def _http(self, rng: random.Random) -> Case:
        _, asked = self._asked(rng)
        post = wire.request_bytes("POST", asked.path, bodies.dumps(asked.body), JSON | self._auth)
        return Case(kind="http", path=asked.path, sent=hostile_http.random_one(post, rng))

    def _get(self, rng: random.Random) -> Case:
        if rng.random() < 0.3:
            path, param = rng.choice([*BAD_GETS.items()])
            return Case(
                kind="get", method="GET", path=path, statuses=frozenset({400}), params=(param,)
            )
        path = rng.choice(GET_PATHS)
        if "?" not in path and not path.startswith("/v1/loads") and rng.random() < 0.3:
            path += rng.choice(ODD_QUERIES)
        if "?" not in path and rng.random() < 0.2:
            path += "/"
        method = rng.choice(["GET", "GET", "GET", "HEAD"])
        return Case(kind="get", method=method, path=path, statuses=OK)

    def _missing(self, rng: random.Random) -> Case:
        if rng.random() < 0.5:
            path = rng.choice(MISSING)
            return Case(kind="missing", method="GET", path=path, statuses=frozenset({404, 405}))
        path = rng.choice([p for p in POST_PATHS if p not in ("/generate", "/start_profile")])
        method = rng.choice(METHODS)
        return Case(kind="method", method=method, path=path, statuses=frozenset({405}))

    def _abort(self, rng: random.Random) -> Case:
        names: list[Any] = [name[: rng.randrange(1, len(name) + 1)] for name in self._names]
        rid = rng.choice(
            [*names, *self._names, "c", "", "-0", "\n\x1b", *[bodies.anything(rng)] * 3]
        )
        body: dict[str, Any] = {"rid": rid}
        if rng.random() < 0.2:
            body["abort_all"] = rng.choice([False, None, 1, "x", []])
        return Case(
            kind="abort", path="/abort_request", body=bodies.dumps(body), headers=JSON,
            statuses=frozenset({200, 400}),
        )  # fmt: skip

    def _tokens(self, rng: random.Random) -> Case:
        ask = rng.choice(asks.ASKS)
        turns = [{"role": "user", "content": ask.prompt}]
        path = rng.choice(["/tokenize", "/v1/tokenize", "/detokenize"])
        if path == "/detokenize":
            body: dict[str, Any] = {"tokens": self._prompt_ids[ask]}
        elif rng.random() < 0.5:
            body = {"prompt": rng.choice([ask.prompt, [ask.prompt] * 3]), "return_token_strs": True}
        else:
            body = {"messages": turns}
        statuses = frozenset({200})
        params: tuple[str, ...] = ()
        if rng.random() < 0.4:
            name = rng.choice([*body])
            wrong = {"return_token_strs": bodies.WRONG_FLAG, "messages": bodies.WRONG_MESSAGES}
            found = wrong.get(name, ("5", "true", "{}", "[null]", "[[5]]"))
            value = rng.choice([one for one in found if one not in bodies.EMPTY])
            body |= {name: bodies.Raw(value)}
            statuses, params = frozenset({400}), (name,)
        return Case(
            kind="tokens", path=path, body=bodies.dumps(body), headers=JSON, statuses=statuses,
            params=params,
        )  # fmt: skip

    def _keys(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        auth = rng.choice(
            ["", "Bearer", "Bearer x", "Basic eDp5", "bearer  ", "\xff\xfe", "Bearer \xe9"]
        )
        return Case(
            kind="keys", path=path, body=bodies.dumps(body), headers=JSON | {"Authorization": auth},
            statuses=frozenset({401}),
        )  # fmt: skip

    def _headers(self, rng: random.Random) -> Case:
        path, body = self._body(rng)
        admin = ("/flush_cache", "/start_profile", "/stop_profile")
        odd: list[tuple[str, Mapping[str, str], frozenset[int]]] = [
            (path, {"Content-Type": "text/plain"}, OK if path.startswith("/api/") else REFUSED),
            (path, {}, OK if path.startswith("/api/") else REFUSED),
            (path, {"Content-Type": "application/json; charset=utf-7"}, OK),
            (path, JSON | {"Content-Encoding": "gzip"}, ANY),
            (path, JSON | {"X-Request-Id": "a b"}, OK),
            (path, JSON | {"X-Request-Id": "fuzz/1"}, OK),
            (path, JSON | {"Accept": "text/html", "Accept-Encoding": "br"}, OK),
            (path, JSON | {"Origin": "http://evil", "Sec-Fetch-Site": "cross-site"}, OK),
            (rng.choice(admin), JSON | {"Origin": "http://evil"}, frozenset({403})),
            (rng.choice(admin), JSON, frozenset({403})),
            (path + "?" + urllib.parse.quote("\n[x] ERROR \x1b"), JSON, OK),
        ]
        where, headers, statuses = rng.choice(odd)
        return Case(
            kind="headers", path=where, body=bodies.dumps(body), headers=headers, statuses=statuses
        )

    def _many(self, rng: random.Random) -> Case:
        """Prompts that are many, or too many."""
        count, n = rng.choice(
            [(30, 1), (5, 6), (1, 60), (5000, 1), (2000, 100), (300, 10), (1, 128)]
        )
        body: dict[str, Any] = {"prompt": ["a"] * count, "n": n, "max_tokens": 1, "temperature": 0}
        path = asks.TEXT
        if rng.random() < 0.5:
            path = asks.GENERATE
            options = {"n": n, "max_new_tokens": 1, "temperature": 0}
            body = {"text": body["prompt"], "sampling_params": options}
        statuses = REFUSED if count * n > MOST_CHOICES else OK
        return Case(
            kind="many", path=path, body=json.dumps(body).encode(), headers=JSON, statuses=statuses
        )


def _gzipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)
