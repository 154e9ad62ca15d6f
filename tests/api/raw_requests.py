"""Raw requests that two readers could read in two ways, or that no reader should take.

Each is what a client sends on one connection. Without a reason it is taken or refused here as by
h11 and uvicorn, or as by the stricter of them. `stricter` says why it is refused here where both
take it; `like_one`, why it is taken here where one of them takes it and the other does not.
"""

from __future__ import annotations

from typing import NamedTuple


class RawCase(NamedTuple):
    """What is sent, and why it is read here otherwise than by others."""

    name: str
    sent: bytes
    stricter: str = ""
    like_one: str = ""


H = b"Host: localhost\r\n"
GET = b"GET / HTTP/1.1\r\n" + H
POST = b"POST / HTTP/1.1\r\n" + H
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
OLD = b"POST / HTTP/1.0\r\n" + H
END = b"\r\n"
OK = GET + END

NO_HTTP_1 = "the version is neither HTTP/1.0 nor HTTP/1.1"
ONE_AUTHORIZATION = "two tokens are two callers"
OTHER_HOST = "the address must name the host of the Host header"
NO_FAITH = "only 100-continue can be expected"
SPACES = "RFC 9112 3: white space of any length may part the words of the line"
NO_STAR = "an address is a path, or a whole address with the host of the Host header"

LIKE_ONE = {
    "lines: empty lines before": "RFC 9112 2.2: a server should pass over an empty line",
    "lines: an empty line of a bare LF before": "RFC 9112 2.2, and an LF alone may end a line",
    "lines: a CR before": "no byte of a request can lie between two requests",
    "several: an empty line between": "RFC 9112 2.2: a server should pass over an empty line",
    "several: two empty lines between": "RFC 9112 2.2, and two are not read otherwise than one",
    "chunks: a size of thirty digits": "zeroes before a size change nothing, and are bounded",
    "first line: two spaces after the method": SPACES,
    "first line: two spaces before the version": SPACES,
    "first line: RTSP": "llhttp tells the version and not the protocol, which nothing depends on",
    "several: an upgrade to a socket": "RFC 9110 7.8: a server may pass over a wish to upgrade",
    "several: an upgrade to HTTP/2": "RFC 9110 7.8: a server may pass over a wish to upgrade",
    "several: an upgrade with a body": "RFC 9110 7.8: a server may pass over a wish to upgrade",
    "several: an upgrade with chunks": "RFC 9110 7.8: a server may pass over a wish to upgrade",
}
"""Where h11 and uvicorn differ, and the one that takes the request is followed."""


def _lengths() -> list[RawCase]:
    def of(*lines: bytes, body: bytes = b"hello") -> bytes:
        return POST + b"".join([line + b"\r\n" for line in lines]) + END + body

    same = {
        "one length": of(b"Content-Length: 5"),
        "no body": of(body=b""),
        "zero": of(b"Content-Length: 0", body=b""),
        "zeroes before it": of(b"Content-Length: 005"),
        "two equal lengths": of(b"Content-Length: 5", b"Content-Length: 5"),
        "two lengths": of(b"Content-Length: 5", b"Content-Length: 4"),
        "two lengths, the smaller first": of(b"Content-Length: 4", b"Content-Length: 5"),
        "equal lengths in one": of(b"Content-Length: 5, 5"),
        "lengths in one": of(b"Content-Length: 5, 6"),
        "a sign": of(b"Content-Length: +5"),
        "a negative length": of(b"Content-Length: -5"),
        "a hexadecimal length": of(b"Content-Length: 0x5"),
        "a fraction": of(b"Content-Length: 5.0"),
        "an exponent": of(b"Content-Length: 5e0"),
        "an underscore": of(b"Content-Length: 1_0", body=b"helloworld"),
        "a length that is no number": of(b"Content-Length: five"),
        "an empty length": of(b"Content-Length:", body=b""),
        "a length of a space": of(b"Content-Length:  ", body=b""),
        "spaces around a length": of(b"Content-Length:  5  "),
        "a tab before a length": of(b"Content-Length:\t5"),
        "a vertical tab before a length": of(b"Content-Length: \x0b5"),
        "a form feed after a length": of(b"Content-Length: 5\x0c"),
        "a null in a length": of(b"Content-Length: 5\x00"),
        "a space within a length": of(b"Content-Length: 1 0", body=b"helloworld"),
        "a length of another script": of(b"Content-Length: \xd9\xa5"),
        "a length beyond 2^64": of(b"Content-Length: 18446744073709551621"),
        "a length beyond 2^32": of(b"Content-Length: 4294967301", body=b""),
        "a length of forty digits": of(b"Content-Length: " + b"9" * 40, body=b""),
        "a space before the colon": of(b"Content-Length : 5"),
        "a tab before the colon": of(b"Content-Length\t: 5"),
        "a length of a GET": GET + b"Content-Length: 5\r\n\r\nhello",
        "a length of a HEAD": b"HEAD / HTTP/1.1\r\n" + H + b"Content-Length: 5\r\n\r\nhello",
        "a length of a DELETE": b"DELETE / HTTP/1.1\r\n" + H + b"Content-Length: 2\r\n\r\nhi",
        "a body that is too short": of(b"Content-Length: 9"),
        "a body that is too long": of(b"Content-Length: 2"),
        "a request for a body": of(b"Content-Length: %d" % len(OK), body=OK),
        "a length and chunks": of(
            b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"
        ),
        "chunks and a length": of(
            b"Transfer-Encoding: chunked", b"Content-Length: 5", body=b"0\r\n\r\n"
        ),
        "chunks and no length": of(
            b"Transfer-Encoding: chunked", b"Content-Length: 0", body=b"0\r\n\r\n"
        ),
        "identity and a length": of(b"Transfer-Encoding: identity", b"Content-Length: 5"),
    }
    return [RawCase(f"length: {name}", sent) for name, sent in same.items()]


def _codings() -> list[RawCase]:
    def of(value: bytes, body: bytes = b"2\r\nhi\r\n0\r\n\r\n") -> bytes:
        return POST + b"Transfer-Encoding:" + value + b"\r\n\r\n" + body

    values = {
        "chunked": b" chunked",
        "in capitals": b" CHUNKED",
        "without a space": b"chunked",
        "a tab": b"\tchunked",
        "a space after it": b" chunked ",
        "identity": b" identity",
        "gzip alone": b" gzip",
        "gzip, chunked": b" gzip, chunked",
        "chunked, gzip": b" chunked, gzip",
        "chunked twice": b" chunked, chunked",
        "chunked, identity": b" chunked, identity",
        "identity, chunked": b" identity, chunked",
        "nothing": b"",
        "a comma": b" ,",
        "chunked and a comma": b" chunked,",
        "a comma and chunked": b" , chunked",
        "a parameter": b" chunked;q=1",
        "quotes": b' "chunked"',
        "a word that ends so": b" xchunked",
        "a word that begins so": b" chunkedx",
        "a vertical tab": b" \x0bchunked",
        "a null": b" chunked\x00",
        "an unknown one": b" cow",
        "another script": b" chunKed",
    }
    cases = [RawCase(f"coding: {name}", of(value)) for name, value in values.items()]
    lines = {
        "two headers": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "two headers, identity first": (
            b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n"
        ),
        "two headers, identity last": (
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"
        ),
        "a space before the colon": b"Transfer-Encoding : chunked\r\n",
        "a name with a dash too many": b"Transfer--Encoding: chunked\r\nContent-Length: 0\r\n",
        "a name with an underscore": b"Transfer_Encoding: chunked\r\nContent-Length: 0\r\n",
    }
    body = b"2\r\nhi\r\n0\r\n\r\n"
    cases += [RawCase(f"coding: {name}", POST + line + END + body) for name, line in lines.items()]
    old = OLD + b"Transfer-Encoding: chunked\r\n\r\n" + body
    cases.append(RawCase("coding: chunked of HTTP/1.0", old))
    both = OLD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\nhi"
    cases.append(RawCase("coding: chunked and a length of HTTP/1.0", both))
    get = GET + b"Transfer-Encoding: chunked\r\n\r\n" + body
    cases.append(RawCase("coding: chunks of a GET", get))
    return cases


def _chunks() -> list[RawCase]:
    bodies = {
        "one": b"5\r\nhello\r\n0\r\n\r\n",
        "two": b"5\r\nhello\r\n1\r\n!\r\n0\r\n\r\n",
        "none": b"0\r\n\r\n",
        "capitals": b"A\r\n0123456789\r\n0\r\n\r\n",
        "small letters": b"a\r\n0123456789\r\n0\r\n\r\n",
        "zeroes before the size": b"0005\r\nhello\r\n0\r\n\r\n",
        "many zeroes at the end": b"5\r\nhello\r\n00000\r\n\r\n",
        "an extension": b"5;a=b\r\nhello\r\n0\r\n\r\n",
        "an extension without a value": b"5;a\r\nhello\r\n0\r\n\r\n",
        "an extension in quotes": b'5;a="b c"\r\nhello\r\n0\r\n\r\n',
        "an extension of nothing": b"5;\r\nhello\r\n0\r\n\r\n",
        "a bare LF in an extension": b"5;a\nhello\r\n0\r\n\r\n",
        "a bare CR in an extension": b"5;a\rb\r\nhello\r\n0\r\n\r\n",
        "a null in an extension": b"5;\x00\r\nhello\r\n0\r\n\r\n",
        "a space after the size": b"5 \r\nhello\r\n0\r\n\r\n",
        "a space before the size": b" 5\r\nhello\r\n0\r\n\r\n",
        "a tab after the size": b"5\t\r\nhello\r\n0\r\n\r\n",
        "a prefix": b"0x5\r\nhello\r\n0\r\n\r\n",
        "a sign": b"+5\r\nhello\r\n0\r\n\r\n",
        "a negative size": b"-5\r\nhello\r\n0\r\n\r\n",
        "an underscore": b"0_5\r\nhello\r\n0\r\n\r\n",
        "no size": b"\r\nhello\r\n0\r\n\r\n",
        "a size that is no number": b"g\r\nhello\r\n0\r\n\r\n",
        "a size beyond 2^64": b"10000000000000005\r\nhello\r\n0\r\n\r\n",
        "a size of thirty digits": b"0" * 29 + b"5\r\nhello\r\n0\r\n\r\n",
        "a bare LF after the size": b"5\nhello\r\n0\r\n\r\n",
        "a bare CR after the size": b"5\rhello\r\n0\r\n\r\n",
        "two CRs after the size": b"5\r\r\nhello\r\n0\r\n\r\n",
        "a bare LF after the data": b"5\r\nhello\n0\r\n\r\n",
        "a bare CR after the data": b"5\r\nhello\r0\r\n\r\n",
        "nothing after the data": b"5\r\nhello0\r\n\r\n",
        "two letters after the data": b"5\r\nhelloXX0\r\n\r\n",
        "data that is too long": b"5\r\nhello!\r\n0\r\n\r\n",
        "data that is too short": b"5\r\nhell\r\n0\r\n\r\n",
        "bare LFs at the end": b"5\r\nhello\r\n0\n\n",
        "a bare LF at the end": b"5\r\nhello\r\n0\r\n\n",
        "no end": b"5\r\nhello\r\n",
        "half an end": b"5\r\nhello\r\n0\r\n",
        "a trailer": b"5\r\nhello\r\n0\r\nA: b\r\n\r\n",
        "a trailer of a length": b"5\r\nhello\r\n0\r\nContent-Length: 9\r\n\r\n",
        "a trailer of a coding": b"5\r\nhello\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n",
        "a trailer without a colon": b"5\r\nhello\r\n0\r\nAb\r\n\r\n",
        "a trailer with a bare LF": b"5\r\nhello\r\n0\r\nA: b\n\r\n",
        "a folded trailer": b"5\r\nhello\r\n0\r\nA: b\r\n c\r\n\r\n",
        "a request within": b"%x\r\n%b\r\n0\r\n\r\n" % (len(OK), OK),
        "a request after": b"5\r\nhello\r\n0\r\n\r\n" + OK,
        "a request after half an end": b"5\r\nhello\r\n0\r\n" + OK,
    }
    return [RawCase(f"chunks: {name}", CHUNKED + body) for name, body in bodies.items()]


def _lines() -> list[RawCase]:
    cases = {
        "plain": OK,
        "lower case names": b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "bare LFs": b"GET / HTTP/1.1\nHost: localhost\n\n",
        "a bare LF after the first line": b"GET / HTTP/1.1\nHost: localhost\r\n\r\n",
        "a bare LF after a header": b"GET / HTTP/1.1\r\nHost: localhost\nA: b\r\n\r\n",
        "a bare LF at the end": GET + b"\n",
        "a bare CR after the first line": b"GET / HTTP/1.1\rHost: localhost\r\n\r\n",
        "a bare CR in a value": GET + b"A: b\rc\r\n\r\n",
        "a bare CR before a header": GET + b"A: b\rB: c\r\n\r\n",
        "a CR before CRLF": GET + b"A: b\r\r\n\r\n",
        "a bare CR in a name": GET + b"A\rB: c\r\n\r\n",
        "a bare CR at the end": GET + b"\r",
        "an LF within a value": GET + b"A: b\nB: c\r\n\r\n",
        "a null in a value": GET + b"A: b\x00c\r\n\r\n",
        "a null in a name": GET + b"A\x00B: c\r\n\r\n",
        "a bell in a value": GET + b"A: \x07\r\n\r\n",
        "a delete in a value": GET + b"A: \x7f\r\n\r\n",
        "latin letters in a value": GET + b"A: \xe4\xff\r\n\r\n",
        "latin letters in a name": GET + b"A\xe4: b\r\n\r\n",
        "folding with a space": GET + b"A: b\r\n c\r\n\r\n",
        "folding with a tab": GET + b"A: b\r\n\tc\r\n\r\n",
        "folding of the first header": b"GET / HTTP/1.1\r\n Host: localhost\r\n\r\n",
        "folding of a coding": POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        "folding of a length": POST + b"Content-Length:\r\n 5\r\n\r\nhello",
        "folding to nothing": GET + b"A: b\r\n \r\n\r\n",
        "folding with a bare LF": GET + b"A: b\n c\r\n\r\n",
        "no colon": GET + b"Ab\r\n\r\n",
        "no name": GET + b": b\r\n\r\n",
        "no value": GET + b"A:\r\n\r\n",
        "a space before the colon": GET + b"A : b\r\n\r\n",
        "a space in a name": GET + b"A B: c\r\n\r\n",
        "a space before a name": b"GET / HTTP/1.1\r\n A: b\r\n" + H + END,
        "a slash in a name": GET + b"A/B: c\r\n\r\n",
        "brackets in a name": GET + b"A(B): c\r\n\r\n",
        "an at sign in a name": GET + b"A@B: c\r\n\r\n",
        "all letters of a name": GET + b"!#$%&'*+-.^_`|~9: c\r\n\r\n",
        "empty lines before": b"\r\n\r\n" + OK,
        "an empty line of a bare LF before": b"\n" + OK,
        "a CR before": b"\r" + OK,
        "a space before the method": b" " + OK,
        "a null before the method": b"\x00" + OK,
        "nothing but noise": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4,
        "no HTTP": b"hello\r\n\r\n",
    }
    return [RawCase(f"lines: {name}", sent) for name, sent in cases.items()]


def _first_lines() -> list[RawCase]:
    def of(line: bytes) -> bytes:
        return line + b"\r\n" + H + END

    same = {
        "two spaces after the method": b"GET  / HTTP/1.1",
        "two spaces before the version": b"GET /  HTTP/1.1",
        "a tab": b"GET\t/\tHTTP/1.1",
        "a space after the version": b"GET / HTTP/1.1 ",
        "no version": b"GET /",
        "no address": b"GET HTTP/1.1",
        "a method alone": b"GET",
        "a small method": b"get / HTTP/1.1",
        "an unknown method": b"BREW / HTTP/1.1",
        "a method with a colon": b"GE:T / HTTP/1.1",
        "an empty method": b" / HTTP/1.1",
        "small letters of HTTP": b"GET / http/1.1",
        "another protocol": b"GET / ICE/1.0",
        "RTSP": b"GET / RTSP/1.0",
        "a comma in the version": b"GET / HTTP/1,1",
        "a version of one digit": b"GET / HTTP/1",
        "a version of three digits": b"GET / HTTP/1.10",
        "a version of zeroes": b"GET / HTTP/01.1",
        "a sign in the version": b"GET / HTTP/+1.1",
        "a null in the address": b"GET /\x00 HTTP/1.1",
        "a space in the address": b"GET /a b HTTP/1.1",
        "a bell in the address": b"GET /\x07 HTTP/1.1",
        "latin letters in the address": b"GET /\xe4 HTTP/1.1",
        "a query": b"GET /?a=b&c HTTP/1.1",
        "a fragment": b"GET /#a HTTP/1.1",
        "a percent sign": b"GET /%zz HTTP/1.1",
        "two slashes": b"GET //a HTTP/1.1",
        "dots": b"GET /../.. HTTP/1.1",
        "HEAD": b"HEAD / HTTP/1.1",
        "DELETE": b"DELETE / HTTP/1.1",
        "a whole address": b"GET http://localhost/ HTTP/1.1",
    }
    cases = [RawCase(f"first line: {name}", of(line)) for name, line in same.items()]
    strict = {
        "OPTIONS of everything": (b"OPTIONS * HTTP/1.1", NO_STAR),
        "version 2.0": (b"GET / HTTP/2.0", NO_HTTP_1),
        "version 1.2": (b"GET / HTTP/1.2", ""),
        "version 0.9": (b"GET / HTTP/0.9", NO_HTTP_1),
        "version 9.9": (b"GET / HTTP/9.9", ""),
        "a whole address of another host": (b"GET http://evil.test/ HTTP/1.1", OTHER_HOST),
        "a whole address with a user": (b"GET http://localhost@evil.test/ HTTP/1.1", OTHER_HOST),
        "a whole address with a port": (b"GET http://localhost:1/ HTTP/1.1", OTHER_HOST),
        "an address without a slash": (b"GET a HTTP/1.1", ""),
        "CONNECT": (b"CONNECT localhost:80 HTTP/1.1", ""),
    }
    cases += [RawCase(f"first line: {name}", of(line), why) for name, (line, why) in strict.items()]
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    return [*cases, RawCase("first line: the preface of HTTP/2", preface)]


def _hosts() -> list[RawCase]:
    first, old = b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.0\r\n"
    return [
        RawCase("host: none", first + END),
        RawCase("host: none of HTTP/1.0", old + END),
        RawCase("host: empty", first + b"Host:\r\n\r\n", "an empty Host names nobody"),
        RawCase("host: two", first + H + b"Host: evil.test\r\n\r\n"),
        RawCase("host: two equal", first + H + H + END),
        RawCase("host: two of HTTP/1.0", old + H + H + END),
        RawCase("host: a port", first + b"Host: localhost:7420\r\n\r\n"),
        RawCase("host: a space before the colon", first + b"Host : localhost\r\n\r\n"),
        RawCase(
            "authorization: two",
            GET + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
            ONE_AUTHORIZATION,
        ),
        RawCase("cookies: two", GET + b"Cookie: a=b\r\nCookie: c=d\r\n\r\n"),
    ]


def _several() -> list[RawCase]:
    post = POST + b"Content-Length: 5\r\n\r\nhello"
    chunked = CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"
    close = GET + b"Connection: close\r\n\r\n"
    upgrade = b"Connection: Upgrade\r\nUpgrade: "
    return [
        RawCase("several: two", OK + OK),
        RawCase("several: ten", OK * 10),
        RawCase("several: with bodies", post + chunked + post + OK),
        RawCase("several: an empty line between", post + END + OK),
        RawCase("several: two empty lines between", post + END + END + OK),
        RawCase("several: noise after a body", post + b"XX\r\n\r\n"),
        RawCase("several: noise after a good one", OK + b"\x00\x01\r\n\r\n"),
        RawCase("several: after close", close + OK),
        RawCase("several: close in capitals", GET + b"Connection: CLOSE\r\n\r\n" + OK),
        RawCase("several: close among others", GET + b"Connection: x, close\r\n\r\n" + OK),
        RawCase("several: keep-alive", GET + b"Connection: keep-alive\r\n\r\n" + OK),
        RawCase("several: of HTTP/1.0", b"GET / HTTP/1.0\r\n" + H + END + OK),
        RawCase("several: half of the second", OK + OK[:20]),
        RawCase("several: an upgrade to a socket", GET + upgrade + b"websocket\r\n\r\n" + OK),
        RawCase("several: an upgrade to HTTP/2", GET + upgrade + b"h2c\r\n\r\n" + OK),
        RawCase("several: an upgrade without a wish", GET + b"Upgrade: h2c\r\n\r\n" + OK),
        RawCase("several: a wish without an upgrade", GET + b"Connection: Upgrade\r\n\r\n" + OK),
        RawCase(
            "several: an upgrade with a body",
            POST + upgrade + b"h2c\r\nContent-Length: 5\r\n\r\nhello" + OK,
        ),
        RawCase(
            "several: an upgrade with chunks",
            POST + upgrade + b"h2c\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n" + OK,
        ),
        RawCase(
            "several: an upgrade with a length and chunks",
            POST
            + upgrade
            + b"h2c\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
            + OK,
        ),
        RawCase(
            "several: a tunnel, then a request",
            b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n" + OK,
        ),
        RawCase(
            "expect: 100-continue", POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"
        ),
        RawCase(
            "expect: of HTTP/1.0", OLD + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"
        ),
        RawCase("expect: something", POST + b"Expect: a\r\nContent-Length: 2\r\n\r\nhi", NO_FAITH),
    ]


def _sizes() -> list[RawCase]:
    small = b"".join([b"A%d: b\r\n" % number for number in range(90)])
    many = b"".join([b"A%d: b\r\n" % number for number in range(200)])
    return [
        RawCase("size: ninety headers", GET + small + END),
        RawCase("size: two hundred headers", GET + many + END, "a request has 100 headers at most"),
        RawCase("size: a long value", GET + b"A: " + b"b" * 8_000 + END + END),
        RawCase("size: a long address", b"GET /" + b"a" * 8_000 + b" HTTP/1.1\r\n" + H + END),
        RawCase(
            "size: too long an address",
            b"GET /" + b"a" * 9_000 + b" HTTP/1.1\r\n" + H + END,
            "an address has 8 KiB at most",
        ),
        RawCase(
            "size: a head beyond 64 KiB",
            GET + b"A: " + b"b" * 70_000 + END + END,
            "a head has 64 KiB at most",
        ),
    ]


RAW_CASES = [
    case._replace(like_one=LIKE_ONE.get(case.name, ""))
    for cases in (
        _lengths(),
        _codings(),
        _chunks(),
        _lines(),
        _first_lines(),
        _hosts(),
        _several(),
        _sizes(),
    )
    for case in cases
]
