"""The useful part of a result: what `steps.ID.output` stands for, by the kind of the step's work.

A result has everything that the work gave. Its output is what the next step mostly wants: of a
command its standard output, of a model the text of its answer.
"""

from __future__ import annotations

from typing import Any

from headgate.workflow.workflow import CommandWork, HttpWork, ModelWork, Work


def output_of(work: Work, result: Any) -> Any:  # noqa: ANN401
    """Return the output in a result, as JSON values; what is not of the usual form is it all."""
    match work:
        case CommandWork():
            return _of_command(result)
        case HttpWork():
            return _of_body(result)
        case ModelWork():
            return _of_model(result)
        case _:
            return result


def _of_command(result: Any) -> Any:  # noqa: ANN401
    if not isinstance(result, dict):
        return result
    if "json" in result:
        return result["json"]
    stdout = result.get("stdout")
    return stdout.removesuffix("\n").removesuffix("\r") if isinstance(stdout, str) else stdout


def _of_body(result: Any) -> Any:  # noqa: ANN401
    # A body that is no JSON is kept as an object with nothing but the text in it.
    if isinstance(result, dict) and result.keys() == {"text"}:
        return result["text"]
    return result


def _of_model(result: Any) -> Any:  # noqa: ANN401
    match result:
        case {"choices": [{"message": {"content": content}}, *_]}:
            return _text(content)
        case {"content": list(content)}:
            return _text(content)
        case _:
            return _of_body(result)


def _text(content: Any) -> Any:  # noqa: ANN401
    """Return the text of an answer; parts that are no text, such as calls of tools, have none."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join([text for text in texts if isinstance(text, str)])
