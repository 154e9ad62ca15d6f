"""The useful part of a result: what `steps.ID.output` stands for, by the kind of the step's work.

A result has everything that the work gave. Its output is what the next step mostly wants: of a
command its standard output, of a model the text of its answer.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headgate.workflow.workflow import CommandWork, HttpWork, ModelWork, Work


def result_value(raw: bytes | msgspec.Raw | None) -> Any:  # noqa: ANN401
    """Return a result that was kept, as JSON values; one that cannot be read is its text.

    What a step gave never ends a run: a service may have taken what nobody here can read.
    """
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return {"text": bytes(raw).decode(errors="replace")}


def output_of(work: Work, result: Any) -> Any:  # noqa: ANN401
    """Return the output in a result, as JSON values; what is not of the usual form is it all."""
    match work:
        case CommandWork():
            return _of_command(result)
        case HttpWork():
            return body_of(result)
        case ModelWork():
            return _of_model(result)
        case _:
            return result


def _of_command(result: Any) -> Any:  # noqa: ANN401
    if not isinstance(result, dict):
        return result
    if "json" in result:
        return result["json"]
    if "stdout" not in result:
        return body_of(result)
    stdout = result["stdout"]
    return stdout.removesuffix("\n").removesuffix("\r") if isinstance(stdout, str) else stdout


def body_of(result: Any) -> Any:  # noqa: ANN401
    """Return the body of an answer in a result: JSON values, or its text."""
    # A body that is no JSON is kept as an object with nothing but the text in it.
    if isinstance(result, dict) and result.keys() == {"text"}:
        return result["text"]
    return result


def has_answer(result: Any) -> bool:  # noqa: ANN401
    """Tell whether a result is the answer of a model; one that calls a tool may have no text."""
    match result:
        case {"choices": [{"message": {}}, *_]} | {"content": list()}:
            return True
        case _:
            return False


def _of_model(result: Any) -> Any:  # noqa: ANN401
    match result:
        case {"choices": [{"message": {"content": content}}, *_]}:
            return _text(content)
        case {"content": list(content)}:
            return _text(content)
        case _:
            return body_of(result)


def _text(content: Any) -> Any:  # noqa: ANN401
    """Return the text of an answer; parts that are no text, such as calls of tools, have none."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join([text for text in texts if isinstance(text, str)])
