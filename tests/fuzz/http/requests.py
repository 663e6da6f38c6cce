"""What a hostile or broken HTTP client sends on one connection: requests, whole ones and others.

Most begin as something valid, and then one or two things about them are changed: the target, a
header, how the body is framed or compressed, what the JSON holds.
"""

import gzip
import json
import random
import zlib
from copy import deepcopy
from typing import Any

from tests.fuzz.inputs import NASTY_JSON

#: What every good sample of this arena looks like.
GOOD_SAMPLE: dict[str, Any] = {
    "fields": {"input_ids": [1, 2, 3], "loss_mask": [False, True, True], "reward": 0.5}
}

_METHODS = [b"GET", b"PUT", b"HEAD", b"OPTIONS", b"post", b"PO\x00ST", b"PRI", b""]
_TARGETS = [
    b"/livez", b"/readyz", b"/statusz", b"/metrics", b"/openapi.json", b"/", b"*", b"//", b"/%00",
    b"http://localhost/livez", b"/v1/samples?x=%zz",
    b"/v1/samples/", b"/v1//samples", b"/\xff\xfe",
    b"/v1/groups/g1/close", b"/v1/groups/g1/close?size=2", b"/v1/groups/g2/close?keep=true",
    b"/v1/groups/%2e%2e%2f/close?size=1&size=2", b"/v1/groups/%ff/close", b"/v1/groups//close",
    b"/v1/groups/" + b"g" * 3000 + b"/close", b"/v1/groups/g/close?size=" + b"9" * 400,
    b"/v1/groups/g/close?size=-1", b"/v1/groups/g/close?keep=maybe", b"/v1/groups/g/close?a=b",
    b"/v1/groups/%00%0d%0a/close?size=3", b"/v1/groups/%f0%9f%98%80/close",
    b"/v1/phases/1/end", b"/v1/phases/2/end?force=0", b"/v1/phases/-1/end",
    b"/v1/phases/%D9%A3/end", b"/v1/phases/" + b"9" * 40 + b"/end",
    b"/v1/phases/1e3/end", b"/v1/phases/%C2%B2/end",
    b"/v1/phases/1/end?force=perhaps", b"/v1/phases/1/end?force=1&force=2", b"/" + b"a" * 9000,
]  # fmt: skip
_HEADERS = [
    b"Expect: 100-continue", b"Expect: 200-nothing", b"Connection: close", b"Connection: upgrade",
    b"Upgrade: websocket", b"X-Nul: a\x00b", b"X\x00Nul: ab", b"X-Folded: a\r\n b", b"no colon",
    b": empty name", b"X-Bell: \x07", b"X-Latin: \xe9\xff", b"X-Long: " + b"a" * 9000, b"Host:",
    b"Host: a\r\nHost: b", b"Authorization: Bearer", b"Authorization: \xff\xff",
    b"Cookie: ;;=\x01=", b"Authorization: Basic " + b"=" * 50,
    b"Content-Type: application/json; charset=utf-99",
    b"Content-Type: multipart/form-data; boundary=", b"Content-Type: ;;;", b"Range: bytes=-1",
    b"Accept-Encoding: gzip;q=x", b"X: " + b"\t" * 300, b"Sec-WebSocket-Key: x", b"Trailer: X",
    b"If-Modified-Since: never", b"Content-Type: application/x-ndjson", b"TE: trailers",
    b"\r\n".join(b"X-%d: y" % at for at in range(200)),
]  # fmt: skip
_VERSIONS = [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTTP/1", b"", b"JUNK"]
_LENGTHS = [b"-1", b"+5", b"1e3", b"0x10", b"", b"9" * 30, b"5, 5", b"\xb2", b"1_0", b"99999"]
_TRANSFERS = [
    b"chunked",
    b"chunked",
    b"gzip, chunked",
    b"chunked, chunked",
    b"identity",
    b"xchunked",
]
_ENCODINGS = [b"gzip", b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip", b"identity", b"nonsense"]

_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**40, 1e308, -0.0, "", "x" * 300, "\ud800",
    "\x00", [], [[]], [[1], [1, 2]], {}, {"dtype": "int64", "data": [1]}, [None], ["1"], [1, "a"],
    {"dtype": "float16", "data": [70000.0]}, {"dtype": "bfloat16", "data": [1.0]}, [[[]] * 3],
    {"dtype": "str", "data": "größe"}, {"dtype": "str", "data": [1]}, {"dtype": "i", "data": "a"},
    {"dtype": "uint8", "data": [[1, 2]], "ragged": True}, {"dtype": "int8", "data": "a"},
    {"dtype": "uint8", "data": [[1, 2], [3]]}, {"dtype": "nonsense", "data": []}, {"data": [1]},
    [True, 1, 0.5], [2**63], [-(2**63)], [1.5], {"dtype": "bool", "data": 2}, [0] * 40, "at-close",
    ["reward"], ["reward", 1],
]  # fmt: skip
_KEYS = ["fields", "sample_id", "group_id", "group_size", "policy_version", "extra", "tokens",
         "staleness_exempt", "per_sample", "loss_tokens", "rows"]  # fmt: skip
_FIELDS = ["input_ids", "loss_mask", "reward", "logprobs", "", "tokens", "\x00", "a" * 300, "env",
           "pixels", "pixels_cu_rows"]  # fmt: skip


def connection(dice: random.Random) -> bytes:
    """All that a client says before it stops sending: one request, or a few at once."""
    stream = bytearray(b"".join(_request(dice) for _ in range(dice.choice((1, 1, 1, 2, 4)))))
    if dice.random() < 0.06:
        for _ in range(dice.randint(1, 3)):
            stream[dice.randrange(len(stream))] = dice.randrange(256)
    if dice.random() < 0.08:
        del stream[dice.randrange(len(stream)) :]
    return bytes(stream)


def _request(dice: random.Random) -> bytes:
    method = dice.choice(_METHODS) if dice.random() < 0.06 else b"POST"
    target = dice.choice(_TARGETS) if dice.random() < 0.3 else b"/v1/samples"
    version = dice.choice(_VERSIONS) if dice.random() < 0.04 else b"HTTP/1.1"
    headers = [b"Host: x"]
    if dice.random() < 0.2:
        headers += dice.sample(_HEADERS, k=dice.choice((1, 1, 2)))
    body = _body(dice)
    if dice.random() < 0.15:
        headers.append(b"Content-Encoding: " + dice.choice(_ENCODINGS))
        body = _packed(dice, body)
    framing = dice.random()
    if framing < 0.1:
        headers.append(b"Transfer-Encoding: " + dice.choice(_TRANSFERS))
        body = _chunks(dice, body)
    elif framing < 0.97:
        headers.append(b"Content-Length: %d" % len(body))
    if framing < 0.02 or framing > 0.98:
        headers.append(b"Content-Length: " + dice.choice(_LENGTHS))
    dice.shuffle(headers)
    return b"\r\n".join([b" ".join((method, target, version)), *headers, b"", body])


def _packed(dice: random.Random, body: bytes) -> bytes:
    packed = dice.choice((gzip.compress(body), zlib.compress(body), body))
    if dice.random() < 0.3:
        packed = packed[: dice.randrange(len(packed) + 1)]
    return packed


def _chunks(dice: random.Random, body: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while at < len(body) and len(parts) < 40:
        size = dice.choice((1, 7, 100, 5000))
        chunk = body[at : at + size]
        said = b"%x" % len(chunk)
        if dice.random() < 0.03:
            said = dice.choice((b"-1", b"fffffffffffffffff", b"0x5", b"5 ", b"", b"g", b"5;a=\x00"))
        parts.append(said + dice.choice((b"", b"", b";a=b")) + b"\r\n" + chunk + b"\r\n")
        at += size
    end = dice.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\n\x00\r\n\r\n", b""))
    return b"".join(parts) + end


def _body(dice: random.Random) -> bytes:
    way = dice.randrange(10)
    if way == 0:
        return dice.choice(NASTY_JSON)
    if way == 1:
        return dice.randbytes(dice.choice((0, 3, 200, 70_000)))
    found = [_sample(dice) for _ in range(dice.choice((1, 1, 1, 2, 5)))]
    if way == 2:
        return json.dumps(found, ensure_ascii=True).encode()
    body = b"\n".join(json.dumps(one).encode() for one in found)
    if way == 3:
        codec = dice.choice(("utf-16", "utf-32", "utf-8-sig", "utf-16-be"))
        return body.decode().encode(codec)
    if way == 4:
        place = dice.randrange(len(body))
        return body[:place] + dice.choice(NASTY_JSON) + body[place + dice.randrange(4) :]
    return body


def _sample(dice: random.Random) -> Any:
    sample: Any = GOOD_SAMPLE | {"fields": dict(GOOD_SAMPLE["fields"])}
    tokens = dice.choice((1, 3, 3, 60, 70))
    sample["fields"]["input_ids"] = list(range(tokens))
    sample["fields"]["loss_mask"] = [dice.random() < 0.5 for _ in range(tokens)]
    for _ in range(dice.choice((0, 0, 1, 2))):
        if dice.random() < 0.5:
            sample[dice.choice(_KEYS)] = deepcopy(dice.choice(_VALUES))  # may be written into
        elif isinstance(sample["fields"], dict):
            sample["fields"][dice.choice(_FIELDS)] = deepcopy(dice.choice(_VALUES))
    if dice.random() < 0.3:
        sample["group_id"], sample["group_size"] = f"g{dice.randrange(9)}", dice.randrange(1, 6)
    if dice.random() < 0.2:
        sample["sample_id"] = f"web-{dice.randrange(1000)}"
    return dice.choice(_VALUES) if dice.random() < 0.03 else sample
