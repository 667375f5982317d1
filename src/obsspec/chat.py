"""Between tokens and messages, for any chat template.

A conversation's tokens only ever grow: what the model saw or wrote is never tokenised again. So the template is taken
apart once, at load time, into what it puts around each message; afterwards a message is encoded alone, as the tokens
that it adds. Whether this gives exactly what the template gives for whole conversations is checked at load time.

Two rules hold for every text that comes from outside (instructions, commands, observations). It is always encoded as
plain text: a tool that prints ``<|im_end|>`` ends no message. And any Python string is accepted: lone surrogates,
which no tokenizer can encode, read as U+FFFD.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from obsspec.context import Tokens
from obsspec.errors import InputError
from obsspec.types import Action, Done, Generation, Malformed, Step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TERMINAL_SYSTEM = (
    "You solve a task in a Linux shell. Reply with exactly one command in a ```bash block; "
    "you then see what it prints. When the task is finished, reply with the single word done."
)
_WORLD_MODEL_SYSTEM = "You are a Linux shell. Reply with exactly what each command prints."

_USER_PROBES = (
    "List the files.",
    "",
    " ",
    "\n",
    "  leading spaces",
    "\n\nleading newlines",
    "trailing spaces  ",
    "trailing newlines\n\n",
    "a\tb\r\nc    d",
    "naïve 東京 🙂 e\u0301",
    "<b>markup</b> {{ braces }} {% if %}",
)
"""Texts that templates are known to change: stripped, collapsed, escaped or normalised."""

_ASSISTANT_PROBES = ("```bash\nls -l\n```", "done", "done\n\n")
"""Texts as a policy writes them. None begins with white space: what a model writes stays in the model's own tokens, and
a tokenizer would have merged such a beginning into the prompt before it."""

_REASONING_PROBE = "<think>\nWhat is there?\n</think>\n\n```bash\nls\n```"
"""What templates drop from all but the last message. Its marks are control tokens in some vocabularies."""

_SYSTEM, _USER, _ASSISTANT, _NEXT = "SystemProbe", "UserProbe", "AssistantProbe", "NextProbe"


class ChatFormat:
    """The chat template of one tokenizer, as tokens that messages add.

    Raises InputError where the template cannot be used this way: it changes or drops message text, writes other text
    for a message once more follow, accepts no system message, or ends an assistant message without a control token.
    """

    end: Tokens
    """The control token that ends an assistant message."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
        self._control = _control_tokens(tokenizer)
        self._control_pattern = re.compile("|".join(map(re.escape, sorted(self._control, key=len, reverse=True))))
        self._plain = self._plain_tokenizer()

        opening = self._render(_SYSTEM, _USER)
        whole = self._render(_SYSTEM, _USER, _ASSISTANT, _NEXT)
        if not whole.startswith(opening + _ASSISTANT) or whole.count(_NEXT) != 1:
            raise self._unusable("it writes the start of a conversation differently once more messages follow")
        after_assistant, self._user_tail = whole.removeprefix(opening + _ASSISTANT).split(_NEXT)
        end = self._control_pattern.match(after_assistant)
        if end is None:
            raise self._unusable(f"it ends an assistant message with {after_assistant!r}, which is no control token")
        self.end = (self._control[end.group()],)
        self._user_head = after_assistant.removeprefix(end.group())
        self._check()

    def open(self, system: str, user: str) -> Tokens:
        """A new conversation: system message, first user message, and what opens the assistant's first message."""
        head, tail = self._render(system, _USER).rsplit(_USER, 1)
        return self._around(head, user, tail)

    def reply(self, user: str) -> Tokens:
        """What follows ``end``: a user message, and what opens the assistant's next message."""
        return self._around(self._user_head, user, self._user_tail)

    def encode(self, text: str) -> Tokens:
        """Text of an assistant message, without what ends it."""
        return tuple(self._plain.encode(_encodable(text), add_special_tokens=False).ids)

    def decode(self, tokens: Tokens) -> str:
        """The text of tokens; control tokens show as their names, incomplete UTF-8 as U+FFFD."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _around(self, head: str, text: str, tail: str) -> Tokens:
        """Encode the template's ``head`` and ``tail`` around a plain ``text``.

        Tokenizers cut at control tokens first and merge freely between them. So the text is encoded together with
        what stands between it and the nearest control tokens.
        """
        last = max((match.end() for match in self._control_pattern.finditer(head)), default=0)
        first = self._control_pattern.search(tail)
        cut = first.start() if first else len(tail)
        return (
            self._template_ids(head[:last])
            + self.encode(head[last:] + text + tail[:cut])
            + self._template_ids(tail[cut:])
        )

    def _template_ids(self, text: str) -> Tokens:
        """Text that the template itself wrote, control tokens and all."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _plain_tokenizer(self) -> Any:
        """The same tokenizer without its control tokens, so that their names are text like any other.

        Added tokens of white space alone stay: they are how some vocabularies write indentation.
        """
        from tokenizers import Tokenizer

        full = getattr(self._tokenizer, "backend_tokenizer", None)
        if full is None:
            raise InputError(
                f"{self._name}: the tokenizer is not of the fast kind; use a model that has tokenizer.json"
            )
        plain = Tokenizer(full.model)
        if full.normalizer is not None:
            plain.normalizer = full.normalizer
        if full.pre_tokenizer is not None:
            plain.pre_tokenizer = full.pre_tokenizer
        plain.add_tokens(
            [token for token in self._tokenizer.added_tokens_decoder.values() if not token.content.strip()]
        )
        return plain

    def _render(self, system: str, *texts: str) -> str:
        """The whole template's text for a conversation that is the assistant's turn."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                _messages(system, *texts), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever they like
            raise self._unusable(f"it fails on system, user and assistant messages ({error})") from error
        return text

    def _check(self) -> None:
        """Raise InputError unless deltas give the tokens of the whole template, and names of controls stay text."""
        for user in _USER_PROBES:
            for written in (_REASONING_PROBE, *_ASSISTANT_PROBES):
                rendered = self._render(_SYSTEM, user, written, user, written, user)
                if rendered.count(written) < 2:
                    raise self._unusable(f"it drops or changes the earlier assistant message {written!r}")
                if rendered.count(user) < 3:
                    raise self._unusable(f"it strips or changes the user message {user!r}")
                if written != _REASONING_PROBE:
                    self._check_tokens(user, written, self._template_ids(rendered))
        for name, token in self._control.items():
            if token in self.encode(f"a{name}b {name}"):
                raise self._unusable(f"the tokenizer reads the text {name!r} as a control token")

    def _check_tokens(self, user: str, written: str, whole: Tokens) -> None:
        grown = self.open(_SYSTEM, user)
        for _ in range(2):
            grown += self.encode(written) + self.end + self.reply(user)
        if grown == whole:
            return
        pairs = zip(grown, whole, strict=False)
        place = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(grown), len(whole)))
        got, expected = (self.decode(tokens[place : place + 4]) for tokens in (grown, whole))
        raise self._unusable(
            f"with the user message {user!r} and the assistant message {written!r}, token {place} on reads"
            f" {expected!r} in the whole conversation, and {got!r} when messages are appended"
        )

    def _unusable(self, why: str) -> InputError:
        return InputError(
            f"chat template of {self._name}: {why}; "
            "set a template that keeps every message as it is (tokenizer.chat_template)"
        )


@dataclass(frozen=True, slots=True)
class TerminalChat:
    """The policy's side of a terminal task: one fenced command a message, or ``done``. A ``types.Chat``."""

    format: ChatFormat

    @property
    def stop(self) -> Tokens:
        """Ids of the tokens that end a generation."""
        return self.format.end

    def start(self, instruction: str) -> Tokens:
        """What the policy sees first."""
        return self.format.open(_TERMINAL_SYSTEM, instruction)

    def parse(self, generation: Generation) -> Step:
        """The one command, the end, or what is wrong with the message.

        Text around the command is allowed, so that a policy can think. ``done`` stands alone on the last line, in a
        message without a command; what stands before it is the answer.
        """
        text = self.text(generation)
        blocks = list(_BLOCK.finditer(text))
        rest = _BLOCK.sub("", text)
        if len(blocks) > 1:
            return Malformed(f"Your message has {len(blocks)} blocks. {_PROTOCOL}")
        if _FENCE.search(rest):
            return Malformed(f"Your message has a block that is not a complete bash block. {_PROTOCOL}")
        if blocks:
            command = blocks[0]["command"].removesuffix("\n")
            return Action(command) if command.strip() else Malformed(f"Your bash block is empty. {_PROTOCOL}")
        if not self._ended(generation):
            return Malformed(f"Your message was too long and was cut off. {_PROTOCOL}")
        answer, _, last = text.strip().rpartition("\n")
        if last.strip() == "done":
            return Done(answer.strip())
        return Malformed(f"Your message has no command. {_PROTOCOL}")

    def observe(self, generation: Generation, text: str) -> Tokens:
        """What follows ``generation`` when its observation reads ``text``; ends the message first if it was cut off."""
        return (() if self._ended(generation) else self.format.end) + self.format.reply(text)

    def text(self, generation: Generation) -> str:
        """What ``generation`` reads, without the token that ended it."""
        return self.format.decode(generation.tokens[:-1] if self._ended(generation) else generation.tokens)

    def action_tokens(self, command: str) -> Tokens:
        """What a policy generates to run ``command``, stop token included: ``parse`` gives ``Action(command)`` back."""
        longest = max((len(run) for run in re.findall("^`+", command, re.MULTILINE)), default=0)
        fence = "`" * max(3, longest + 1)
        return self.format.encode(f"{fence}bash\n{command}\n{fence}") + self.format.end

    def done_tokens(self) -> Tokens:
        """What a policy generates to finish, stop token included."""
        return self.format.encode("done") + self.format.end

    def _ended(self, generation: Generation) -> bool:
        return generation.tokens[-1:] == self.format.end


_PROTOCOL = "Reply with exactly one command in a ```bash block, or with the single word done."
_BLOCK = re.compile(
    r"^(?P<fence>`{3,})[ \t]*(?:bash|sh|shell)?[ \t]*\n(?P<command>.*?)^(?P=fence)`*[ \t]*$", re.MULTILINE | re.DOTALL
)
_FENCE = re.compile(r"^```", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class WorldModelChat:
    """The world model's side of the same task: each command is a user message, its observation the answer.

    A prompt is ``start``, then ``ask`` and ``answer`` for every exchange so far, then ``ask`` for the command in
    question, in training as in use.
    """

    format: ChatFormat

    @property
    def stop(self) -> Tokens:
        """Ids of the tokens that end a generation."""
        return self.format.end

    def start(self, instruction: str) -> Tokens:
        """What the world model sees first. It ends with an answer, so that every ``ask`` follows one."""
        return self.format.open(_WORLD_MODEL_SYSTEM, instruction) + self.answer("ready")

    def ask(self, command: str) -> Tokens:
        """What follows an answer when ``command`` is to be predicted, up to where the prediction starts."""
        return self.format.reply(command)

    def answer(self, observation: str) -> Tokens:
        """What the world model generates to predict ``observation``, stop token included."""
        return self.format.encode(observation) + self.format.end

    def text(self, tokens: Tokens) -> str:
        """The observation that generated ``tokens`` predict: the inverse of ``answer``."""
        return self.format.decode(tokens[:-1] if tokens[-1:] == self.format.end else tokens)


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Name and id of every token that is not made of ordinary text."""
    return {token.content: id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}


def _messages(system: str, *texts: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *turns]


def _encodable(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
