"""One small chat template per dialect, in the shape of its family, and how the family writes.

The templates are ours: they keep what makes a family hard (reasoning that is dropped or opened in
the prompt, turns that nothing closes, answers inside the turn, ids of nine characters, arguments
as text) and leave out everything else.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from tokenizers_for_tests import make_tokenizer

Arguments = dict[str, object]
Calls = list[tuple[str, Arguments]]


@dataclass(frozen=True)
class Family:
    template: str
    calls: Callable[[Calls], str]
    """How the family writes so many calls."""
    broken: tuple[str, str]
    """What is replaced in a call to make it unreadable."""
    special: tuple[str, ...]
    """The first is the tokenizer's end token."""
    think: tuple[str, str] = ("<think>\n", "\n</think>\n\n")
    final: tuple[str, str] = ("", "")
    """Around the text of a turn."""
    call_end: str = ""
    """Ends a turn with calls, where that is not the close token."""
    history: str = "append_only"
    text_beside_calls: bool = True

    def tokenizer(self):
        return make_tokenizer(self.template, special=self.special)

    def turn(self, text: str = "", calls: Calls = (), reasoning: str = "") -> str:
        opened_by_prompt = not self.think[0]
        thought = f"{self.think[0]}{reasoning}{self.think[1]}"
        thought = thought if reasoning or opened_by_prompt else ""
        said = f"{self.final[0]}{text}{self.final[1]}" if text else ""
        return thought + said + (self.calls(calls) + self.call_end if calls else "")


def build(user, assistant, tool, generation, *, calls, think=None, system="", first=""):
    """A template from what stands around messages; `@` is the message's content."""
    thought = (
        "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        if think is None
        else think
    )
    content = "{{ m.content }}"
    template = (
        f"{first}{{% if tools %}}{system}{{{{ tools | tojson }}}}{{% endif %}}"
        "{% for m in messages %}"
        f"{{% if m.role == 'assistant' %}}{assistant.replace('@', thought + content + calls)}"
        f"{{% elif m.role == 'tool' %}}{tool.replace('@', content)}"
        f"{{% else %}}{user.replace('@', content)}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{generation}{{% endif %}}"
    )
    return template.replace("%}\n", "%}{{ '\\n' }}")  # transformers trims a line end there


def each(body, between="", around=("", "")):
    """Calls in a template: `$name`, `$args` (JSON) and `$id` in `body` stand for a call's own."""
    body = (
        body.replace("$name", "{{ c.function.name }}")
        .replace("$args", "{{ c.function.arguments | tojson }}")
        .replace("$id", "{{ c.id }}")
    )
    gap = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return (
        f"{{% if m.tool_calls %}}{around[0]}{{% for c in m.tool_calls %}}{body}{gap}{{% endfor %}}"
        f"{around[1]}{{% endif %}}"
    )


def parameters(body):
    """Arguments in a template, one `body` each: strings as they are, everything else as JSON."""
    return (
        "{% for k, v in c.function.arguments.items() %}"
        + body.replace("KEY", "{{ k }}").replace(
            "VALUE", "{{ v if v is string else (v | tojson) }}"
        )
        + "{% endfor %}"
    )


def dumps(value):
    return json.dumps(value, ensure_ascii=False)


def plain(value):
    return value if isinstance(value, str) else dumps(value)


def joined(one, between="", around=("", "")):
    return lambda calls: around[0] + between.join(one(*call) for call in calls) + around[1]


def tags(body):
    """`body` for each argument."""
    return lambda arguments: "".join(
        body.replace("KEY", key).replace("VALUE", plain(value)) for key, value in arguments.items()
    )


CHATML = {
    "user": "<|im_start|>{{ m.role }}\n@<|im_end|>\n",
    "assistant": "<|im_start|>assistant\n@<|im_end|>\n",
    "tool": "<|im_start|>user\n<tool_response>\n@\n</tool_response><|im_end|>\n",
    "generation": "<|im_start|>assistant\n",
}
IM = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
# As Qwen3's and many others: reasoning before the last user message is dropped.
DROPPED = (
    "{% if m.reasoning_content and not messages[loop.index0:] | selectattr('role', 'equalto', "
    "'user') | list %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
)
LLAMA = {
    "user": "<|start_header_id|>user<|end_header_id|>\n\n@<|eot_id|>",
    "assistant": "<|start_header_id|>assistant<|end_header_id|>\n\n@<|eot_id|>",
    "tool": "<|start_header_id|>ipython<|end_header_id|>\n\n@<|eot_id|>",
    "generation": "<|start_header_id|>assistant<|end_header_id|>\n\n",
}
LLAMA_SPECIAL = ("<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>")
DEEPSEEK = {
    "user": "<｜User｜>@",
    "assistant": (
        "{% if messages[loop.index0 - 1].role != 'tool' %}<｜Assistant｜>{% endif %}"
        "@<｜end▁of▁sentence｜>"
    ),
    "tool": "<｜tool▁output▁begin｜>@<｜tool▁output▁end｜>",
    "generation": "{% if messages[-1].role != 'tool' %}<｜Assistant｜>{% endif %}",
}
DEEPSEEK_SPECIAL = (
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
JSON_BROKEN = ('"count": 3', '"count": ,')
GEMMA_VALUE = (
    "{% for k, v in c.function.arguments.items() %}{{ k }}:"
    '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
    "{% if not loop.last %},{% endif %}{% endfor %}"
)
PYTHON_CALL = (
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)


def gemma_call(name, arguments):
    values = ",".join(
        f'{k}:<|"|>{v}<|"|>' if isinstance(v, str) else f"{k}:{dumps(v)}"
        for k, v in arguments.items()
    )
    return f"<|tool_call>call:{name}{{{values}}}<tool_call|>"


def python_call(name, arguments):
    return f"{name}({', '.join(f'{k}={dumps(v)}' for k, v in arguments.items())})"


M3 = "]<]minimax[>["
K3_TYPE = {str: "string", int: "number"}
COHERE = "<|START_OF_TURN_TOKEN|>"
QUOTED_KEY = '"KEY"'


def json_family(around, *, between="", think=("<think>\n", "\n</think>\n\n")):
    """ChatML with calls as JSON in a frame, each in its own or all in one list."""
    call = '{"name": "$name", "arguments": $args}'
    one_list = bool(between)
    frame = ("", "") if one_list else around
    return Family(
        build(
            **CHATML,
            calls=each(frame[0] + call + frame[1], between, around if one_list else ("", "")),
            think="{% if m.reasoning_content %}"
            + f"{think[0]}{{{{ m.reasoning_content }}}}{think[1]}{{% endif %}}",
        ),
        joined(
            lambda n, a: f'{frame[0]}{{"name": "{n}", "arguments": {dumps(a)}}}{frame[1]}',
            between,
            around if one_list else ("", ""),
        ),
        JSON_BROKEN,
        IM,
        think=think,
    )


FAMILIES = {
    "hermes": Family(
        build(
            **CHATML,
            calls=each('\n<tool_call>\n{"name": "$name", "arguments": $args}\n</tool_call>'),
            think=DROPPED,
        ),
        joined(
            lambda n, a: f'\n<tool_call>\n{{"name": "{n}", "arguments": {dumps(a)}}}\n</tool_call>'
        ),
        JSON_BROKEN,
        IM,
        history="fork",
    ),
    "qwen_xml": Family(
        build(
            **{**CHATML, "generation": "<|im_start|>assistant\n<think>\n"},
            calls=each(
                "\n<tool_call>\n<function=$name>\n"
                + parameters("<parameter=KEY>\nVALUE\n</parameter>\n")
                + "</function>\n</tool_call>"
            ),
            think="<think>\n{{ m.reasoning_content }}\n</think>\n\n",
        ),
        joined(
            lambda n, a: (
                f"\n<tool_call>\n<function={n}>\n"
                f"{tags('<parameter=KEY>{nl}VALUE{nl}</parameter>{nl}'.format(nl=chr(10)))(a)}"
                "</function>\n</tool_call>"
            )
        ),
        ("</parameter>\n</function>", "</function>"),
        IM,
        think=("", "\n</think>\n\n"),
    ),
    "llama_json": Family(
        build(
            **{
                **LLAMA,
                "assistant": (
                    "<|start_header_id|>assistant<|end_header_id|>\n\n"
                    "{% if m.tool_calls %}"
                    + each('{"name": "$name", "parameters": $args}', between="; ")
                    + "{% else %}@{% endif %}<|eot_id|>"
                ),
            },
            calls="",
            think="",
        ),
        joined(lambda n, a: f'{{"name": "{n}", "parameters": {dumps(a)}}}', "; "),
        JSON_BROKEN,
        LLAMA_SPECIAL,
        text_beside_calls=False,
    ),
    "pythonic": Family(
        build(
            **{
                **LLAMA,
                "assistant": (
                    "<|start_header_id|>assistant<|end_header_id|>\n\n"
                    "{% if m.tool_calls %}"
                    + each(PYTHON_CALL, between=", ", around=("[", "]"))
                    + "{% else %}@{% endif %}<|eot_id|>"
                ),
            },
            calls="",
            think="",
        ),
        joined(python_call, ", ", ("[", "]")),
        ("count=3", "count="),
        LLAMA_SPECIAL,
        text_beside_calls=False,
    ),
    "mistral": Family(
        build(
            "[INST]@[/INST]",
            "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
            "{{ raise_exception('ids have nine characters') }}{% endif %}{% endfor %}@</s>",
            "{% if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role "
            "!= 'tool' %}{{ raise_exception('an answer to no call') }}{% endif %}"
            "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]@[/TOOL_RESULTS]",
            "",
            calls=each("[TOOL_CALLS]$name[ARGS]$args"),
            think="{% if m.reasoning %}[THINK]{{ m.reasoning }}[/THINK]{% endif %}",
            first="<s>",
        ),
        joined(lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}"),
        JSON_BROKEN,
        (
            "</s>",
            "<s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[CALL_ID]",
            "[ARGS]",
            "[THINK]",
            "[/THINK]",
            "[TOOL_RESULTS]",
            "[TOOL_CONTENT]",
            "[/TOOL_RESULTS]",
        ),
        think=("[THINK]", "[/THINK]"),
    ),
    "gemma4": Family(
        build(
            "<|turn>{{ m.role }}\n@<turn|>\n",
            "{% if messages[loop.index0 - 1].role != 'tool' %}<|turn>model\n{% endif %}@"
            "{% if not m.tool_calls %}<turn|>\n{% endif %}",
            "<|tool_response>response:{{ m.name }}{{ '{' }}value:<|\"|>@<|\"|>}<tool_response|>",
            "{% if messages[-1].role != 'tool' %}<|turn>model\n{% endif %}",
            calls=each("<|tool_call>call:$name{{ '{' }}" + GEMMA_VALUE + "{{ '}' }}<tool_call|>"),
            think=("{% if m.thinking %}<|channel>thought\n{{ m.thinking }}\n<channel|>{% endif %}"),
        ),
        joined(gemma_call),
        ("count:3", "count:"),
        (
            "<turn|>",
            "<|turn>",
            "<|channel>",
            "<channel|>",
            "<|tool_call>",
            "<tool_call|>",
            "<|tool_response>",
            "<tool_response|>",
            '<|"|>',
        ),
        think=("<|channel>thought\n", "\n<channel|>"),
        call_end="<|tool_response>",
    ),
    "harmony": Family(
        build(
            "<|start|>{{ m.role }}<|message|>@<|end|>",
            "{% if m.content and m.thinking and m.tool_calls %}"
            "{{ raise_exception('text or thinking beside a call, not both') }}{% endif %}"
            "{% set keeps = loop.last or m.tool_calls %}"
            "{% if m.thinking and keeps %}<|start|>assistant<|channel|>analysis<|message|>"
            "{{ m.thinking }}<|end|>{% endif %}"
            "{% if m.content %}<|start|>assistant<|channel|>"
            "{{ 'commentary' if m.tool_calls else 'final' }}<|message|>{{ m.content }}"
            "{% if loop.last and not m.tool_calls %}<|return|>{% else %}<|end|>{% endif %}"
            "{% endif %}"
            + each(
                "<|start|>assistant<|channel|>commentary to=functions.$name <|constrain|>json"
                "<|message|>$args<|call|>"
            ),
            "{% set asked = messages[loop.index0 - 1] %}{% if not asked.tool_calls %}"
            "{{ raise_exception('an answer to no call') }}{% endif %}"
            "<|start|>functions.{{ asked.tool_calls[0].function.name }} to=assistant"
            "<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>",
            "<|start|>assistant",
            calls="",
            think="",
        ),
        joined(
            lambda n, a: (
                f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}"
            ),
            "<|call|><|start|>assistant",
        ),
        JSON_BROKEN,
        (
            "<|return|>",
            "<|start|>",
            "<|message|>",
            "<|channel|>",
            "<|end|>",
            "<|call|>",
            "<|constrain|>",
        ),
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        final=("<|channel|>final<|message|>", ""),
        call_end="<|call|>",
        history="fork",
        text_beside_calls=False,
    ),
    "glm4": Family(
        build(
            "<|user|>\n@",
            "<|assistant|>\n@",
            "<|observation|>\n<tool_response>\n@\n</tool_response>",
            "<|assistant|>\n",
            calls=each(
                "\n<tool_call>$name\n"
                + parameters("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
                + "</tool_call>"
            ),
            first="[gMASK]<sop>",
        ),
        joined(
            lambda n, a: (
                f"\n<tool_call>{n}\n"
                + "".join(
                    f"<arg_key>{k}</arg_key>\n<arg_value>{plain(v)}</arg_value>\n"
                    for k, v in a.items()
                )
                + "</tool_call>"
            )
        ),
        ("3</arg_value>", "3"),
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>"),
        call_end="<|observation|>",
    ),
    "deepseek_v3": Family(
        # Arguments are text here: a mapping cannot be put together with strings. And how an answer
        # is written depends on what stands before the turn.
        build(
            **DEEPSEEK
            | {
                "tool": "{% if loop.index0 == 2 %}<｜tool▁outputs▁begin｜>{% endif %}"
                "<｜tool▁output▁begin｜>@<｜tool▁output▁end｜>"
            },
            calls=each(
                "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name "
                "+ '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}",
                around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            ),
        ),
        joined(
            lambda n, a: (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{dumps(a)}\n```"
                "<｜tool▁call▁end｜>"
            ),
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        JSON_BROKEN,
        DEEPSEEK_SPECIAL,
        history="fork",
    ),
    "deepseek_v31": Family(
        build(
            **DEEPSEEK,
            calls=each(
                "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$args<｜tool▁call▁end｜>",
                around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            ),
        ),
        joined(
            lambda n, a: f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>",
            around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        JSON_BROKEN,
        DEEPSEEK_SPECIAL,
    ),
    "deepseek_v32": Family(
        build(
            **DEEPSEEK,
            calls=each(
                '<｜DSML｜invoke name="$name">\n'
                + parameters(
                    '<｜DSML｜parameter name="KEY" string="{{ \'true\' if v is string else '
                    "'false' }}\">VALUE</｜DSML｜parameter>\n"
                )
                + "</｜DSML｜invoke>\n",
                around=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
            ),
        ),
        joined(
            lambda n, a: (
                f'<｜DSML｜invoke name="{n}">\n'
                + "".join(
                    f'<｜DSML｜parameter name="{k}" string="{str(isinstance(v, str)).lower()}">'
                    f"{plain(v)}</｜DSML｜parameter>\n"
                    for k, v in a.items()
                )
                + "</｜DSML｜invoke>\n"
            ),
            around=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        ),
        ("3</｜DSML｜parameter>", "3"),
        DEEPSEEK_SPECIAL,
    ),
    "kimi_k2": Family(
        build(
            "<|im_user|>user<|im_middle|>@<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>@<|im_end|>",
            "<|im_system|>tool<|im_middle|>## Return of {{ m.tool_call_id }}\n@<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
            calls=each(
                "<|tool_call_begin|>$id<|tool_call_argument_begin|>$args<|tool_call_end|>",
                around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            ),
        ),
        lambda calls: (
            "<|tool_calls_section_begin|>"
            + "".join(
                f"<|tool_call_begin|>functions.{n}:{i}<|tool_call_argument_begin|>{dumps(a)}"
                "<|tool_call_end|>"
                for i, (n, a) in enumerate(calls)
            )
            + "<|tool_calls_section_end|>"
        ),
        JSON_BROKEN,
        (
            "<|im_end|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_system|>",
            "<|im_middle|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "minimax_m2": Family(
        build(
            "]~b]{{ m.role }}\n@[e~[\n",
            "]~b]ai\n@[e~[\n",
            "]~b]tool\n<response>@</response>[e~[\n",
            "]~b]ai\n<think>\n",
            calls=each(
                '<invoke name="$name">\n'
                + parameters('<parameter name="KEY">VALUE</parameter>\n')
                + "</invoke>\n",
                around=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
            ),
            think="<think>\n{{ m.reasoning_content }}\n</think>\n\n",
        ),
        joined(
            lambda n, a: (
                f'<invoke name="{n}">\n'
                + "".join(f'<parameter name="{k}">{plain(v)}</parameter>\n' for k, v in a.items())
                + "</invoke>\n"
            ),
            around=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
        ),
        ("3</parameter>", "3"),
        ("[e~[", "]~b]", "<minimax:tool_call>", "</minimax:tool_call>"),
        think=("", "\n</think>\n\n"),
    ),
    "minimax_m3": Family(
        build(
            "]~b]{{ m.role }}\n@[e~[\n",
            "]~b]ai\n@[e~[\n",
            "]~b]tool\n<response>@</response>[e~[\n",
            "]~b]ai\n",
            calls=each(
                f'{M3}<invoke name="$name">'
                + parameters(f"{M3}<KEY>VALUE{M3}</KEY>")
                + f"{M3}</invoke>\n",
                around=(f"{M3}<tool_call>\n", f"{M3}</tool_call>"),
            ),
            think="{% if m.reasoning_content %}<mm:think>{{ m.reasoning_content }}</mm:think>"
            "{% else %}</mm:think>{% endif %}",
        ),
        joined(
            lambda n, a: (
                f'{M3}<invoke name="{n}">'
                + "".join(f"{M3}<{k}>{plain(v)}{M3}</{k}>" for k, v in a.items())
                + f"{M3}</invoke>\n"
            ),
            around=(f"{M3}<tool_call>\n", f"{M3}</tool_call>"),
        ),
        (f"3{M3}</count>", "3"),
        ("[e~[", "]~b]", M3, "<mm:think>", "</mm:think>"),
        think=("<mm:think>", "</mm:think>"),
    ),
    "kimi_k3": Family(
        build(
            '<|open|>message role="{{ m.role }}"<|sep|>@<|close|>message<|sep|><|end_of_msg|>',
            '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>{{ m.reasoning_content }}'
            "<|close|>think<|sep|><|open|>response<|sep|>@<|close|>message<|sep|><|end_of_msg|>",
            '<|open|>message role="tool"<|sep|>@<|close|>message<|sep|><|end_of_msg|>',
            '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
            calls="<|close|>response<|sep|>"
            + each(
                '<|open|>call tool="$name" index="{{ loop.index }}"<|sep|>'
                "{% for k, v in c.function.arguments.items() %}"
                '<|open|>argument key="{{ k }}" type="{{ \'string\' if v is string else '
                "'number' }}\"<|sep|>{{ v if v is string else (v | tojson) }}"
                "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>",
                around=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            ),
            think="",
        ),
        lambda calls: (
            "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
            + "".join(
                f'<|open|>call tool="{n}" index="{i + 1}"<|sep|>'
                + "".join(
                    f'<|open|>argument key="{k}" type="{K3_TYPE[type(v)]}"<|sep|>{plain(v)}'
                    "<|close|>argument<|sep|>"
                    for k, v in a.items()
                )
                + "<|close|>call<|sep|>"
                for i, (n, a) in enumerate(calls)
            )
            + "<|close|>tools<|sep|>"
        ),
        ("3<|close|>argument<|sep|>", "3"),
        ("<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"),
        think=("", "<|close|>think<|sep|>"),
        final=("<|open|>response<|sep|>", "<|close|>response<|sep|><|close|>message<|sep|>"),
        call_end="<|close|>message<|sep|>",
    ),
    "phi4": Family(
        build(
            "<|user|>@<|end|>",
            "<|assistant|>@<|end|>",
            "<|tool_response|>@<|end|>",
            "<|assistant|>",
            calls=each(
                '{"name": "$name", "arguments": $args}',
                between=", ",
                around=("<|tool_call|>[", "]<|/tool_call|>"),
            ),
        ),
        joined(
            lambda n, a: f'{{"name": "{n}", "arguments": {dumps(a)}}}',
            ", ",
            ("<|tool_call|>[", "]<|/tool_call|>"),
        ),
        JSON_BROKEN,
        (
            "<|end|>",
            "<|user|>",
            "<|assistant|>",
            "<|tool_response|>",
            "<|tool_call|>",
            "<|/tool_call|>",
        ),
    ),
    "olmo3": Family(
        build(
            **{**CHATML, "tool": "<|im_start|>environment\n@<|im_end|>\n"},
            calls=each(PYTHON_CALL, between="\n", around=("<function_calls>", "</function_calls>")),
        ),
        joined(python_call, "\n", ("<function_calls>", "</function_calls>")),
        ("count=3", "count="),
        IM,
    ),
    "lfm2": Family(
        build(
            **CHATML,
            calls=each(
                PYTHON_CALL, between=", ", around=("<|tool_call_start|>[", "]<|tool_call_end|>")
            ),
        ),
        joined(python_call, ", ", ("<|tool_call_start|>[", "]<|tool_call_end|>")),
        ("count=3", "count="),
        IM,
    ),
    "seed_oss": Family(
        build(
            "<seed:bos>{{ m.role }}\n@<seed:eos>",
            "<seed:bos>assistant\n@<seed:eos>",
            "<seed:bos>tool\n@<seed:eos>",
            "<seed:bos>assistant\n",
            calls=each(
                "<seed:tool_call>\n<function=$name>\n"
                + parameters("<parameter=KEY>VALUE</parameter>\n")
                + "</function>\n</seed:tool_call>"
            ),
            think="{% if m.reasoning_content %}<seed:think>{{ m.reasoning_content }}</seed:think>"
            "{% endif %}",
        ),
        joined(
            lambda n, a: (
                f"<seed:tool_call>\n<function={n}>\n"
                f"{tags('<parameter=KEY>VALUE</parameter>' + chr(10))(a)}</function>\n"
                "</seed:tool_call>"
            )
        ),
        ("3</parameter>", "3"),
        ("<seed:eos>", "<seed:bos>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>"),
        think=("<seed:think>", "</seed:think>"),
    ),
    "functiongemma": Family(
        build(
            "<start_of_turn>{{ m.role }}\n@<end_of_turn>\n",
            "{% if messages[loop.index0 - 1].role != 'tool' %}<start_of_turn>model\n{% endif %}@"
            "{% if not m.tool_calls %}<end_of_turn>\n{% endif %}",
            "<start_function_response>response:{{ m.name }}{{ '{' }}value:<escape>@<escape>}"
            "<end_function_response>",
            "{% if messages[-1].role != 'tool' %}<start_of_turn>model\n{% endif %}",
            calls=each(
                "<start_function_call>call:$name{{ '{' }}"
                + GEMMA_VALUE.replace('<|"|>', "<escape>")
                + "{{ '}' }}<end_function_call>"
            ),
        ),
        joined(
            lambda n, a: (
                gemma_call(n, a)
                .replace('<|"|>', "<escape>")
                .replace("<|tool_call>", "<start_function_call>")
                .replace("<tool_call|>", "<end_function_call>")
            )
        ),
        ("count:3", "count:"),
        (
            "<end_of_turn>",
            "<start_of_turn>",
            "<start_function_call>",
            "<end_function_call>",
            "<start_function_response>",
            "<end_function_response>",
            "<escape>",
        ),
        call_end="<start_function_response>",
    ),
    "cohere": Family(
        build(
            COHERE + "<|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            COHERE + "<|CHATBOT_TOKEN|>"
            "{% if m.reasoning %}<|START_THINKING|>{{ m.reasoning }}<|END_THINKING|>{% endif %}"
            "{% if m.tool_calls %}"
            + each(
                '{"tool_call_id": "$id", "tool_name": "$name", "parameters": $args}',
                between=", ",
                around=("<|START_ACTION|>[", "]<|END_ACTION|>"),
            )
            + "{% else %}<|START_RESPONSE|>@<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>",
            COHERE + "<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>@<|END_TOOL_RESULT|>"
            "<|END_OF_TURN_TOKEN|>",
            COHERE + "<|CHATBOT_TOKEN|>",
            calls="",
            think="",
        ),
        lambda calls: (
            "<|START_ACTION|>["
            + ", ".join(
                f'{{"tool_call_id": "{i}", "tool_name": "{n}", "parameters": {dumps(a)}}}'
                for i, (n, a) in enumerate(calls)
            )
            + "]<|END_ACTION|>"
        ),
        JSON_BROKEN,
        (
            "<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|START_THINKING|>",
            "<|END_THINKING|>",
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|START_TOOL_RESULT|>",
            "<|END_TOOL_RESULT|>",
        ),
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
        final=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "step3": Family(
        build(
            "<|BOT|>{{ m.role }}\n@<|EOT|>",
            "<|BOT|>assistant\n@<|EOT|>",
            "<|BOT|>tool_response\n@<|EOT|>",
            "<|BOT|>assistant\n",
            calls=each(
                "<｜tool_call_begin｜>function<｜tool_sep｜>$name\n"
                + '<steptml:invoke name="$name">'
                + parameters('<steptml:parameter name="KEY">VALUE</steptml:parameter>')
                + "</steptml:invoke><｜tool_call_end｜>",
                between="<｜tool_sep｜>",
                around=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
            ),
        ),
        joined(
            lambda n, a: (
                f'<｜tool_call_begin｜>function<｜tool_sep｜>{n}\n<steptml:invoke name="{n}">'
                f"{tags('<steptml:parameter name=' + QUOTED_KEY + '>VALUE</steptml:parameter>')(a)}"
                "</steptml:invoke><｜tool_call_end｜>"
            ),
            "<｜tool_sep｜>",
            ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        ),
        ("3</steptml:parameter>", "3"),
        (
            "<|EOT|>",
            "<|BOT|>",
            "<｜tool_calls_begin｜>",
            "<｜tool_calls_end｜>",
            "<｜tool_call_begin｜>",
            "<｜tool_call_end｜>",
            "<｜tool_sep｜>",
        ),
    ),
    "longcat": json_family(
        ("\n<longcat_tool_call>", "</longcat_tool_call>"),
        think=("<longcat_think>", "</longcat_think>"),
    ),
    "apertus": Family(
        build(
            "<|user_start|>@<|user_end|>",
            "<|assistant_start|>@<|assistant_end|>",
            "<|user_start|>@<|user_end|>",
            "<|assistant_start|>",
            calls=each(
                '{"$name": $args}', between=", ", around=("<|tools_prefix|>[", "]<|tools_suffix|>")
            ),
            think="{% if m.reasoning %}<|inner_prefix|>{{ m.reasoning }}<|inner_suffix|>"
            "{% endif %}",
        ),
        joined(
            lambda n, a: f'{{"{n}": {dumps(a)}}}', ", ", ("<|tools_prefix|>[", "]<|tools_suffix|>")
        ),
        JSON_BROKEN,
        (
            "<|assistant_end|>",
            "<|assistant_start|>",
            "<|user_start|>",
            "<|user_end|>",
            "<|tools_prefix|>",
            "<|tools_suffix|>",
            "<|inner_prefix|>",
            "<|inner_suffix|>",
        ),
        think=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "nemotron_v2": json_family(("<TOOLCALL>[", "]</TOOLCALL>"), between=", "),
    "jamba": json_family(("<tool_calls>[", "]</tool_calls>"), between=", "),
    "minicpm5": Family(
        build(
            **CHATML,
            calls=each(
                '<function name="$name">'
                + parameters('<param name="KEY">VALUE</param>')
                + "</function>"
            ),
        ),
        joined(
            lambda n, a: (
                f'<function name="{n}">'
                f"{tags('<param name=' + QUOTED_KEY + '>VALUE</param>')(a)}</function>"
            )
        ),
        ("3</param>", "3"),
        IM,
    ),
    "granite3": json_family(("<|tool_call|>[", "]"), between=", "),
    "xlam": Family(
        build(
            **{
                **CHATML,
                "assistant": "<|im_start|>assistant\n{% if m.tool_calls %}"
                + each('{"name": "$name", "arguments": $args}', between=", ", around=("[", "]"))
                + "{% else %}@{% endif %}<|im_end|>\n",
            },
            calls="",
            think="",
        ),
        joined(lambda n, a: f'{{"name": "{n}", "arguments": {dumps(a)}}}', ", ", ("[", "]")),
        JSON_BROKEN,
        IM,
        text_beside_calls=False,
    ),
}
FAMILIES["deepseek_v4"] = replace(
    FAMILIES["deepseek_v32"],
    template=FAMILIES["deepseek_v32"].template.replace("｜function_calls", "｜tool_calls"),
    calls=lambda calls: (
        FAMILIES["deepseek_v32"].calls(calls).replace("｜function_calls", "｜tool_calls")
    ),
)
