"""Messages of the interfaces by which agents talk to models, as messages of OpenAI's chat completions.

Read are chat completions themselves, with ``tool_calls`` or the older ``function_call``; items of OpenAI's responses;
Anthropic's messages; and the lines of sessions in which Codex and Claude Code wrap these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Json = dict[str, Any]

_NO_MESSAGES = (
    *("reasoning", "item_reference", "compaction", "web_search_call", "file_search_call", "mcp_call", "mcp_list_tools"),
    *("summary", "file-history-snapshot", "queue-operation", "progress"),
)
"""Types of items in responses, and of lines in sessions, that neither call nor answer a tool."""


def chat_messages(item: Any) -> list[Json] | None:
    """What one item of a log says; nothing where that is of no interest, None where it is no message at all.

    Raises LookupError, TypeError or AttributeError for one that lacks what its kind must have.
    """
    match item:
        case {"isSidechain": True} | {"isMeta": True}:
            return []  # Another agent's, or not of this conversation.
        case {"message": {"role": str()} as inner}:
            return _timed(_of_role(inner), item)
        case {"type": "response_item", "payload": {"role": str()} as inner}:
            return _timed(_of_role(inner), item)
        case {"type": "response_item", "payload": {"type": str()} as inner}:
            return _timed(_of_kind(inner) or [], item)
        case {"role": str()}:
            return _of_role(item)
        case {"payload": dict()} | {"sessionId": str()} | {"record_type": str()}:
            return []
        case {"type": str()}:
            return _of_kind(item)
        case dict():
            return None
    raise TypeError(f"a message must be an object, not {item!r:.40}")


def joined(messages: Iterable[Json]) -> list[Json]:
    """The messages of a conversation. Calls that follow one another, as where each is an item of its own, are one
    message's, whatever is remarked between them: the policy goes on when all are answered."""
    conversation: list[Json] = []
    for message in messages:
        if not (conversation and conversation[-1].get("tool_calls") and message.get("role") == "assistant"):
            conversation.append(message)
        elif message.get("tool_calls"):
            before = conversation.pop()
            conversation.append({**message, "tool_calls": [*before["tool_calls"], *message["tool_calls"]]})
    return conversation


def _of_kind(item: Json) -> list[Json] | None:
    """Of items of OpenAI's responses, which have a type in place of a role."""
    kind = item["type"]
    match kind:
        case "function_call" | "custom_tool_call":
            arguments = item["arguments"] if "arguments" in item else item["input"]
            return [_calling([(item["call_id"], item["name"], arguments)])]
        case "local_shell_call" | "shell_call":
            action = item["action"]
            if isinstance(action.get("commands"), list):
                action = {"command": "\n".join(action["commands"])}
            return [_calling([(item.get("call_id") or item["id"], "shell", action)])]
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output" | "shell_call_output":
            return [_answering(item.get("call_id") or item["id"], item["output"])]
    return [] if kind in _NO_MESSAGES else None


def _of_role(message: Json) -> list[Json]:
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    used = [part for part in parts if part.get("type") == "tool_use"]
    results = [part for part in parts if part.get("type") == "tool_result"]
    more = {name: value for name, value in message.items() if name in ("timestamp", "created_at")}
    if used:
        return [{**_calling([(part["id"], part["name"], part["input"]) for part in used]), **more}]
    if results:
        said = [part for part in parts if part.get("text")]
        answers = [{**_answering(part["tool_use_id"], part.get("content")), **more} for part in results]
        return [*answers, {"role": "user", "content": said, **more}] if said else answers
    if isinstance(message.get("function_call"), dict):
        function = message["function_call"]
        return [{**_calling([(None, function["name"], function["arguments"])]), **more}]
    if message.get("tool_calls"):
        calls = [
            (call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
        ]
        return [{**message, **_calling(calls)}]
    if "tool_call_id" in message:
        _check_key(message["tool_call_id"])
    return [{**message, "role": "tool"} if message["role"] == "function" else message]


def _calling(calls: Iterable[tuple[Any, Any, Any]]) -> Json:
    """A message of the policy. ``calls``: id, tool and arguments of each."""
    called = []
    for key, name, given in calls:
        _check_key(key)
        called.append({"id": key, "function": {"name": name, "arguments": given}})
    return {"role": "assistant", "tool_calls": called}


def _answering(key: Any, content: Any) -> Json:
    _check_key(key)
    return {"role": "tool", "tool_call_id": key, "content": content}


def _check_key(key: Any) -> None:
    if not isinstance(key, str | int | None):
        raise TypeError(f"the id of a call must be text, not {key!r:.40}")


def _timed(messages: list[Json], line: Json) -> list[Json]:
    """The time is the line's."""
    return [{**message, "timestamp": line["timestamp"]} for message in messages] if "timestamp" in line else messages
