from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obsspec.chat import ChatFormat, TerminalChat, WorldModelChat
from obsspec.context import Tokens
from obsspec.errors import InputError
from obsspec.types import Action, Done, Generation, Malformed
from tiny import CHATML, tokenizer

TOKENIZER = tokenizer()
FORMAT = ChatFormat(TOKENIZER)
CHAT = TerminalChat(FORMAT)
CONTROL = set(TOKENIZER.added_tokens_decoder)
AWKWARD = [
    "",
    " ",
    "\n\nx",
    "x\n\n",
    "  x  ",
    "naïve 🙂",
    "a\x00b",
    "\ud800",
    "\udc80\ud83d\ude00",
    "<|im_end|>\n<think>",
]

any_text = st.text(st.characters(), max_size=40)


def generation(text: str, ended: bool = True) -> Generation:
    return Generation(FORMAT.encode(text) + (FORMAT.end if ended else ()))


def controls(tokens: Tokens) -> list[int]:
    return [token for token in tokens if token in CONTROL]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_growing_gives_the_tokens_of_the_whole_conversation(texts: list[str]) -> None:
    messages = [{"role": "system", "content": "Be brief."}]
    grown: Tokens = ()
    for number, text in enumerate(texts):
        grown += FORMAT.reply(text) if number else FORMAT.open("Be brief.", text)
        messages.append({"role": "user", "content": text})
        whole = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert grown == tuple(whole)
        grown += FORMAT.encode("```bash\nls\n```") + FORMAT.end
        messages.append({"role": "assistant", "content": "```bash\nls\n```"})


@pytest.mark.parametrize("text", AWKWARD)
def test_no_text_writes_control_tokens(text: str) -> None:
    assert controls(CHAT.start(text)) == controls(CHAT.start("x"))
    assert controls(CHAT.observe(generation("x"), text)) == controls(CHAT.observe(generation("x"), "x"))
    world = WorldModelChat(FORMAT)
    assert controls(world.start(text) + world.ask(text)) == controls(world.start("x") + world.ask("x"))
    assert controls(world.answer(text)) == list(FORMAT.end)


@given(any_text)
@settings(max_examples=200, deadline=None)
def test_any_text_can_be_read(text: str) -> None:
    assert CHAT.start(text)
    readable = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    world = WorldModelChat(FORMAT)
    assert world.text(world.answer(text)) == readable
    assert world.text(world.answer(text)[:-1]) == readable  # cut off before its end


@given(any_text.filter(str.strip))
@settings(max_examples=200, deadline=None)
def test_actions_read_back(command: str) -> None:
    readable = command.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    tokens = CHAT.action_tokens(command)
    assert CHAT.parse(Generation(tokens, finish="stop")) == Action(readable)
    assert tokens[-1:] == CHAT.stop


@pytest.mark.parametrize(
    "command", ["ls -l", "  indented", "cat > a.md <<'E'\n```bash\nls\n```\n````\nE", "a\n\nb\n", "echo '<|im_end|>'"]
)
def test_commands_with_fences_and_names_of_controls_read_back(command: str) -> None:
    assert CHAT.parse(Generation(CHAT.action_tokens(command))) == Action(command)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("```bash\nls\n```", "ls"),
        ("```sh\nls\n```", "ls"),
        ("```shell\nls\n```\n", "ls"),
        ("```\nls -l\ncd x\n```", "ls -l\ncd x"),
        ("First I look around.\n\n```bash\nls\n```\nThen I see.", "ls"),
        ("``` bash \nls\n```  ", "ls"),
    ],
)
def test_one_fenced_command_is_the_action(text: str, command: str) -> None:
    assert CHAT.parse(generation(text)) == Action(command)
    assert CHAT.parse(generation(text, ended=False)) == Action(command)  # cut off, but complete


def test_done() -> None:
    assert CHAT.parse(Generation(CHAT.done_tokens())) == Done()
    assert CHAT.parse(generation(" done \n")) == Done()
    assert CHAT.parse(generation("There are 3.\ndone")) == Done("There are 3.")


@pytest.mark.parametrize(
    ("text", "ended", "why"),
    [
        ("", True, "no command"),
        ("I have done it", True, "no command"),
        ("done", False, "cut off"),
        ("Let me think about", False, "cut off"),
        ("```bash\nls", False, "not a complete bash block"),
        ("```bash\nls", True, "not a complete bash block"),
        ("```python\nprint()\n```", True, "not a complete bash block"),
        ("```python\nprint()\n```\n```bash\nls\n```", True, "not a complete bash block"),
        ("```bash\nls\n```\n```bash\npwd\n```", True, "2 blocks"),
        ("```bash\nls\n```\n```bash\npw", False, "not a complete bash block"),
        ("```bash\n```", True, "empty"),
        ("```bash\n  \n```", True, "empty"),
    ],
)
def test_malformed_says_why_and_what_to_do(text: str, ended: bool, why: str) -> None:
    step = CHAT.parse(generation(text, ended))
    assert isinstance(step, Malformed)
    assert why in step.reply
    assert "exactly one command" in step.reply


def test_observation_ends_a_message_that_was_cut_off() -> None:
    ended = generation("```bash\nls\n```")
    cut_off = generation("```bash\nls\n```", ended=False)
    assert cut_off.tokens + CHAT.observe(cut_off, "a.txt") == ended.tokens + CHAT.observe(ended, "a.txt")
    assert CHAT.observe(Generation(()), "x") == FORMAT.end + FORMAT.reply("x")


def test_the_world_model_reads_a_conversation() -> None:
    world = WorldModelChat(FORMAT)
    tokens = world.start("Do it.") + world.ask("ls") + world.answer("a\n") + world.ask("pwd") + world.answer("/")
    text = FORMAT.decode(tokens)
    parts = [
        "system\n",
        "user\nDo it.<|im_end|>",
        "user\nls<|im_end|>",
        "assistant\na\n<|im_end|>",
        "user\npwd<|im_end|>",
    ]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert text.endswith("assistant\n/<|im_end|>")


def template(user: str = "message['content']", assistant: str = "message['content']", end: str = "<|im_end|>") -> str:
    return (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['role'] == 'assistant' %}{{ " + assistant + " }}" + end + "\n"
        "{% else %}{{ " + user + " }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


@pytest.mark.parametrize(
    ("chat_template", "why"),
    [
        (template(user="message['content'] | trim"), "strips or changes the user message ' '"),
        (
            template(assistant="message['content'].split('</think>')[-1]"),
            "drops or changes the earlier assistant message",
        ),
        (template(assistant="'' if not loop.last else message['content']"), "once more messages follow"),
        (template(end=""), "no control token"),
        ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML, "no system"),
        ("{% for tool in tools %}{{ tool.name }}{% endfor %}{{ tools[0].name + 1 }}" + CHATML, "fails on"),
        ("{{ messages | length }}" + CHATML, "once more messages follow"),
    ],
)
def test_unusable_templates_are_refused_with_the_reason(chat_template: str, why: str) -> None:
    with pytest.raises(InputError) as refused:
        ChatFormat(tokenizer(chat_template))
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_without_template_is_refused() -> None:
    plain = tokenizer()
    plain.chat_template = None
    with pytest.raises(InputError, match="chat template"):
        ChatFormat(plain)


def test_a_usable_variant_is_accepted() -> None:
    assert ChatFormat(tokenizer(template())).reply("x") == FORMAT.reply("x")
