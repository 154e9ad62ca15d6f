"""What a user of an SDK writes: ask once, whole, streamed or with a tool, and print the answer.

`sdk_program.py CLIENT MODE` reads BASE_URL, MODEL and PROMPT. Of a stream each piece is a line. An
error of the API is printed as a user would see it, and the program ends with 1.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

MODEL, PROMPT, BASE_URL = (os.environ[name] for name in ("MODEL", "PROMPT", "BASE_URL"))
KEY = os.environ.get("KEY", "any")
MAX_TOKENS = 4_096
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
SAID: list[Any] = [{"role": "user", "content": PROMPT}]


def show(text: str | None) -> None:
    """Print what came, at once."""
    if text:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def weather(arguments: str | dict[str, Any]) -> str:
    """Do what the tool does."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    show(f"looked up {given['city']}")
    return "rain"


def openai_chat(mode: str) -> None:
    """Ask for chat completions, synchronously."""
    import openai  # noqa: PLC0415

    client = openai.OpenAI(base_url=BASE_URL, api_key=KEY)
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    if mode == "stream":
        for chunk in client.chat.completions.create(model=MODEL, messages=SAID, stream=True):
            show(chunk.choices[0].delta.content)
    elif mode == "plain":
        answer = client.chat.completions.create(model=MODEL, messages=SAID)
        show(answer.choices[0].message.content)
    else:
        answer = client.chat.completions.create(model=MODEL, messages=SAID, tools=[tool])
        message: Any = answer.choices[0].message
        (call,) = message.tool_calls
        result = weather(call.function.arguments)
        turns = [*SAID, message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        answer = client.chat.completions.create(model=MODEL, messages=turns, tools=[tool])
        show(answer.choices[0].message.content)


async def openai_responses(mode: str) -> None:
    """Ask for responses, asynchronously."""
    import openai  # noqa: PLC0415

    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY) as client:
        tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
        if mode == "stream":
            async with client.responses.stream(model=MODEL, input=PROMPT) as events:
                async for event in events:
                    if event.type == "response.output_text.delta":
                        show(event.delta)
        elif mode == "plain":
            show((await client.responses.create(model=MODEL, input=PROMPT)).output_text)
        else:
            first: Any = await client.responses.create(model=MODEL, input=SAID, tools=[tool])
            call = first.output[-1]
            output = weather(call.arguments)
            result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
            turns = [*SAID, *first.output, result]
            show(
                (await client.responses.create(model=MODEL, input=turns, tools=[tool])).output_text
            )


def anthropic_messages(mode: str) -> None:
    """Ask for messages, synchronously."""
    import anthropic  # noqa: PLC0415

    client = anthropic.Anthropic(base_url=BASE_URL, api_key=KEY)
    given: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS}
    if mode == "stream":
        with client.messages.stream(messages=SAID, **given) as events:
            for text in events.text_stream:
                show(text)
    elif mode == "plain":
        answer: Any = client.messages.create(messages=SAID, **given)
        show(answer.content[0].text)
    else:
        given["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
        answer = client.messages.create(messages=SAID, **given)
        answer = client.messages.create(messages=after_tool(answer), **given)
        show(answer.content[0].text)


async def anthropic_async(mode: str) -> None:
    """Ask for messages, asynchronously."""
    import anthropic  # noqa: PLC0415

    async with anthropic.AsyncAnthropic(base_url=BASE_URL, api_key=KEY) as client:
        given: dict[str, Any] = {"model": MODEL, "max_tokens": MAX_TOKENS}
        if mode == "stream":
            async with client.messages.stream(messages=SAID, **given) as events:
                async for text in events.text_stream:
                    show(text)
        elif mode == "plain":
            answer: Any = await client.messages.create(messages=SAID, **given)
            show(answer.content[0].text)
        else:
            given["tools"] = [{"name": "weather", "input_schema": SCHEMA}]
            answer = await client.messages.create(messages=SAID, **given)
            answer = await client.messages.create(messages=after_tool(answer), **given)
            show(answer.content[0].text)


def after_tool(answer: Any) -> list[Any]:
    """Return the conversation with the result of the tool."""
    call = answer.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": weather(call.input)}
    said = {"role": "assistant", "content": answer.content}
    return [*SAID, said, {"role": "user", "content": [result]}]


def langchain(mode: str, model: Any) -> None:
    """Ask a chat model of LangChain."""
    if mode == "stream":
        for chunk in model.stream(PROMPT):
            show(chunk.text)
    elif mode == "plain":
        show(model.invoke(PROMPT).text)
    else:
        from langchain_core.messages import (  # type: ignore[import-not-found] # noqa: PLC0415
            HumanMessage,
            ToolMessage,
        )

        description = "Tell the weather of a city."
        tool = {"title": "weather", "description": description, **SCHEMA}
        with_tool = model.bind_tools([tool])
        first = with_tool.invoke(PROMPT)
        (call,) = first.tool_calls
        result = ToolMessage(content=weather(call["args"]), tool_call_id=call["id"])
        show(with_tool.invoke([HumanMessage(PROMPT), first, result]).text)


def langchain_openai(mode: str) -> None:
    """Ask OpenAI's model of LangChain."""
    from langchain_openai import (  # type: ignore[import-not-found] # noqa: PLC0415
        ChatOpenAI,
    )

    langchain(mode, ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY))


def langchain_anthropic(mode: str) -> None:
    """Ask Anthropic's model of LangChain."""
    from langchain_anthropic import (  # type: ignore[import-not-found] # noqa: PLC0415
        ChatAnthropic,
    )

    model = ChatAnthropic(model=MODEL, base_url=BASE_URL, api_key=KEY, max_tokens=MAX_TOKENS)
    langchain(mode, model)


PROGRAMS: dict[str, Any] = {
    "openai-chat": openai_chat,
    "openai-responses": openai_responses,
    "anthropic": anthropic_messages,
    "anthropic-async": anthropic_async,
    "langchain-openai": langchain_openai,
    "langchain-anthropic": langchain_anthropic,
}


def main() -> None:
    """Run one of the programs."""
    program, mode = PROGRAMS[sys.argv[1]], sys.argv[2]
    try:
        asking = program(mode)
        if asking is not None:
            asyncio.run(asking)
    except Exception as error:
        # Both SDKs have an error of this name, and neither is loaded in each of the programs.
        if "APIError" not in [base.__name__ for base in type(error).__mro__]:
            raise
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
