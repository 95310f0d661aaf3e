"""Chat templates and special tokens of model families, and conversations to try them.

Templates are those of the families' own files, without their parts about tools.
"""

import functools
import json
import random
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT = (
    "Say banana. It is no answer, and yes: 1 + 2 = 3. user assistant model system end"
    " im_end eot_id INST Today Date Cutting Knowledge where is the turn of a question?"
)
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{"
    " raise_exception('Conversation roles must alternate"
    " user/assistant/user/assistant/...') }}{% endif %}"
)


class Family(NamedTuple):
    """A family of models.

    Attributes:
      template: Its chat template.
      kind: Class of its tokenizer in Transformers.
      tokens: Special tokens by name.
      more: Other special tokens.
      learned: Regular expression of an answer; its group is what counts.
      systems: If it takes a system's message.
      pieces: If its tokenizer is one of sentencepiece.
    """

    template: str
    kind: str
    tokens: dict[str, str]
    more: tuple[str, ...]
    learned: str
    systems: bool = True
    pieces: bool = False


LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}" + ALTERNATE + "{% if loop.index0 == 0 and"
    " system_message != false %}{% set content = '<<SYS>>\\n' + system_message +"
    " '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}"
    "{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user'"
    " %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' +"
    " eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content"
    " = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+"
    " message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set"
    " content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n'"
    " }}{% endif %}"
)
LLAMA32 = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message #}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {{- raise_exception("Cannot put tools in the first user message") }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud.' }}
        {{- ' You are a helpful assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
        (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n') %}
            {%- set reasoning_content = reasoning_content.split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' }}
                {{- reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
                {{- content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\nOPEN' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System"
    " role not supported') }}{% endif %}{% for message in messages %}"
    + ALTERNATE
    + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' +"
    " message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if"
    " message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
    "{% endif %}{% endfor %}"
)
MIXTRAL = MISTRAL.replace(
    "{{ message['content'] + eos", "{{ ' ' + message['content'] + eos"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n'"
    " + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}"
    "{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] =="
    " 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}"
    "{{ eos_token }}{% endif %}"
)
OLMO2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '<|system|>\n' + message['content'] + '\n' }}{% elif message['role'] == 'user'"
    " %}{{ '<|user|>\n' + message['content'] + '\n' }}{% elif message['role'] =="
    " 'assistant' %}{% if not loop.last %}{{ '<|assistant|>\n'  + message['content'] +"
    " eos_token + '\n' }}{% else %}{{ '<|assistant|>\n'  + message['content'] +"
    " eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}"
    "{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
# Its file says which tokens are an answer.
SMOL = """{%- for message in messages -%}
    {%- if message.role == "assistant" -%}
        {%- generation -%}
        {{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' }}
        {{- message.content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- endgeneration -%}
    {%- else -%}
        {{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
DEEPSEEK = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false"
    " %}{% endif %}{% set ns = namespace(system_prompt='') %}{%- for message in"
    " messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt ="
    " message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}"
    "{%- for message in messages %}{%- if message['role'] == 'user' %}{{'<｜User｜>' +"
    " message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and"
    " message['content'] is not none %}{% set content = message['content'] %}{% if"
    " '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif"
    " %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor"
    " -%}{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)
CHATML = r"<\|im_start\|>assistant\n(%s.*?<\|im_end\|>\n)"
HEADER3 = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"
LLAMA3_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
LLAMA3_MORE = ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>")
QWEN_TOKENS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
QWEN_MORE = ("<|im_start|>", "<tool_call>")
SP_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
GEMMA_TOKENS = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
TURNS = ("<start_of_turn>", "<end_of_turn>")
GEMMA_LEARNED = r"<start_of_turn>model\n(.*?<end_of_turn>\n)"
FAMILIES = {
    "llama 2": Family(
        LLAMA2,
        "LlamaTokenizerFast",
        SP_TOKENS,
        (),
        r"\[/INST\]( .*?</s>)",
        pieces=True,
    ),
    "llama 3": Family(
        LLAMA3, "PreTrainedTokenizerFast", LLAMA3_TOKENS, LLAMA3_MORE, HEADER3
    ),
    "llama 3.2": Family(
        LLAMA32, "PreTrainedTokenizerFast", LLAMA3_TOKENS, LLAMA3_MORE, HEADER3
    ),
    "qwen 2.5": Family(
        QWEN25, "Qwen2TokenizerFast", QWEN_TOKENS, QWEN_MORE, CHATML % ""
    ),
    "qwen 3": Family(
        QWEN3.replace("OPEN", ""),
        "Qwen2TokenizerFast",
        QWEN_TOKENS,
        (*QWEN_MORE, "<think>", "</think>"),
        CHATML % "",
    ),
    "qwen 3, thinking": Family(
        QWEN3.replace("OPEN", "<think>\\n"),
        "Qwen2TokenizerFast",
        QWEN_TOKENS,
        (*QWEN_MORE, "<think>", "</think>"),
        r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>\n)",
    ),
    "gemma 2": Family(
        GEMMA2,
        "GemmaTokenizerFast",
        GEMMA_TOKENS,
        TURNS,
        GEMMA_LEARNED,
        systems=False,
        pieces=True,
    ),
    "gemma 3": Family(
        GEMMA3, "GemmaTokenizerFast", GEMMA_TOKENS, TURNS, GEMMA_LEARNED, pieces=True
    ),
    "mistral": Family(
        MISTRAL,
        "LlamaTokenizerFast",
        SP_TOKENS,
        ("[INST]", "[/INST]"),
        r"\[/INST\](.*?</s>)",
        systems=False,
        pieces=True,
    ),
    "mixtral": Family(
        MIXTRAL,
        "LlamaTokenizerFast",
        SP_TOKENS,
        (),
        r"\[/INST\](.*?</s>)",
        systems=False,
        pieces=True,
    ),
    "phi 3": Family(
        PHI3,
        "LlamaTokenizerFast",
        SP_TOKENS | {"eos_token": "<|endoftext|>"},
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        r"<\|assistant\|>\n(.*?<\|end\|>\n)",
        pieces=True,
    ),
    "olmo 2": Family(
        OLMO2,
        "GPT2TokenizerFast",
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
        (),
        r"<\|assistant\|>\n(.*?<\|endoftext\|>)",
    ),
    "smollm 3": Family(
        SMOL,
        "PreTrainedTokenizerFast",
        {"eos_token": "<|im_end|>"},
        ("<|im_start|>", "<think>", "</think>"),
        r"(<\|im_start\|>assistant\n.*?<\|im_end\|>\n)",
    ),
    "deepseek": Family(
        DEEPSEEK,
        "LlamaTokenizerFast",
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
        r"<｜Assistant｜>(.*?<｜end▁of▁sentence｜>)",
    ),
}


@functools.cache
def byte_level():
    """Return a byte-level BPE, as JSON."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator([TEXT], trainer)
    return model.to_str()


def splits():
    """Return the words of Llama 3 and Qwen: digits apart, and marks with line ends."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, letters])


@functools.cache
def sentence_pieces(prefix):
    """Return a BPE as of sentencepiece, as JSON: spaces are letters, and characters
    that it does not know are bytes.
    """
    model = tokenizers.Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    model.train_from_iterator([TEXT.replace(" ", "▁")], trainer)
    found = json.loads(model.to_str())
    begin = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [*begin, *found["model"]["vocab"]]
    found["model"] |= dict(
        vocab={word: i for i, word in enumerate(words)},
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    model = tokenizers.Tokenizer.from_str(json.dumps(found))
    steps = [normalizers.Prepend("▁")] if prefix else []
    model.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    model.decoder = decoders.Sequence(parts)
    return model.to_str()


def conversations(family, count, seed=0):
    """Return conversations: with a system, several turns, empty answers, answers that
    are in the question or in the mark behind them, and text of many scripts.
    """
    rng = random.Random(seed)
    answers = [
        "",
        "yes",
        "end",
        "im_end",
        "eot_id",
        "s",
        "banana",
        "<b>no</b>",
        "é 世界",
    ]
    answers += [
        " 🙂 two\n\nlines ",
        'A "quote" & <tag>',
        "model",
        "</",
        "\n",
        "3",
        "｜",
        "e\u0301\u200b\u0085 ",
        "<think>\nyes\n</think>\n\nyes",
    ]
    found = []
    for _ in range(count):
        messages = []
        if FAMILIES[family].systems and rng.random() < 0.4:
            messages.append(
                dict(role="system", content="You answer " + rng.choice(answers))
            )
        for _ in range(rng.randint(1, 4)):
            answer = rng.choice(answers)
            question = rng.choice(["Say", "Ready?", "Où est", "is it"]) + " " + answer
            messages.append(dict(role="user", content=question))
            messages.append(dict(role="assistant", content=answer))
        found.append(messages)
    return found
