"""Folders that Transformers writes: ids, chats and masks are those of Transformers, and
files of strangers can neither run code nor run for ever.
"""

import dataclasses
import json
import re

import numpy as np
import pytest
import tokenizers

from models.huggingface import limits
from models.huggingface.tokenizer import read_tokenizer
from models.training.examples import example
from tests.helpers import parametrize, refused
from tests.models.chat_families import (
    FAMILIES,
    byte_level,
    conversations,
    sentence_pieces,
    splits,
)

transformers = pytest.importorskip("transformers")
CONVERSATIONS = 50


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """Return a family's name, Transformers' tokenizer of its folder, and ours."""
    name = request.param
    one = FAMILIES[name]
    folder = tmp_path_factory.mktemp("family")
    model = tokenizers.Tokenizer.from_str(byte_level())
    if one.pieces:
        content = sentence_pieces("llama" in name or "mi" in name)
        model = tokenizers.Tokenizer.from_str(content)
    elif name not in ("olmo 2", "deepseek"):
        model.pre_tokenizer = splits()
    if "qwen" in name:
        model.normalizer = tokenizers.normalizers.NFC()
    model.add_special_tokens([*one.tokens.values()])
    theirs = getattr(transformers, one.kind)(tokenizer_object=model, **one.tokens)
    strips = name == "phi 3"
    more = [tokenizers.AddedToken(t, rstrip=strips, special=True) for t in one.more]
    theirs.add_special_tokens({"additional_special_tokens": more})
    theirs.chat_template = one.template
    # Older folders have the template in tokenizer_config.json
    theirs.save_pretrained(folder, save_jinja_files=name in ("llama 3.2", "qwen 3"))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return name, theirs, read_tokenizer(folder / "tokenizer.json")


def test_ids_and_special_tokens_are_those_of_transformers(family):
    _, theirs, ours = family
    assert type(theirs).__name__ == FAMILIES[family[0]].kind
    assert ours.end == theirs.eos_token_id
    assert ours.size == len(theirs)
    known = theirs.special_tokens_map
    assert ours.specials == {name: value for name, value in known.items() if value}
    for text in ("Say banana.", " é 世界 🙂\n\n", "<|im_end|></s><pad> a", "", "｜"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert (
            ours.encode_plain([text])[0].tolist()
            == theirs(text, add_special_tokens=False)["input_ids"]
        )


def test_chats_and_masks_are_those_of_transformers(family):
    """Ids and text equal Transformers', and so do masks if the template has tags; else
    exactly the family's answers with their marks count.
    """
    name, theirs, ours = family
    for messages in conversations(name, CONVERSATIONS):
        whole = theirs.apply_chat_template(messages, tokenize=False)
        assert ours.rendered(messages) == whole
        opened = theirs.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert ours.rendered(messages[:-1], opened=True) == opened
        made = example({"messages": messages}, ours)
        found = theirs(whole, add_special_tokens=False, return_offsets_mapping=True)
        assert made.ids.tolist() == found["input_ids"]
        begins, ends = np.asarray(found["offset_mapping"]).T
        wanted = np.zeros(len(begins), bool)
        for answer in re.finditer(FAMILIES[name].learned, whole, re.DOTALL):
            wanted |= (ends > answer.start(1)) & (begins < answer.end(1))
        if ours.marks_answers:
            wanted = theirs.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True
            )["assistant_masks"]
        assert made.counted.tolist() == np.asarray(wanted, bool).tolist(), whole


OWN_TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
END = dict(content="</s>", lstrip=False, normalized=False, rstrip=False, special=True)
HI = [dict(role="user", content="Hi")]


@pytest.fixture
def folder(tmp_path):
    """Return a function that writes files next to a tokenizer.json with three special
    tokens, and reads it.
    """

    def write(change=None, **files):
        model = tokenizers.Tokenizer.from_str(byte_level())
        model.add_special_tokens(["<s>", "</s>", "<end>"])
        content = json.loads(model.to_str()) | (change or {})
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        for name, value in files.items():
            text = value if isinstance(value, str) else json.dumps(value)
            suffix = ".jinja" if name == "chat_template" else ".json"
            (tmp_path / (name + suffix)).write_text(text)
        read_tokenizer.cache_clear()
        return read_tokenizer(tmp_path / "tokenizer.json")

    return write


@parametrize(
    "settings",
    [
        dict(eos_token="</s>"),
        dict(eos_token=END),
        dict(eos_token=END | {"__type": "added_tokens_decoder is None"}),
        dict(eos_token="</s>", added_tokens_decoder={"401": END}),
        dict(eos_token="</s>", extra_special_tokens={}),
        dict(eos_token="</s>", extra_special_tokens=["<s>"]),
        dict(eos_token="</s>", extra_special_tokens={"image_token": "<image>"}),
        dict(eos_token="</s>", model_specific_special_tokens={"image_token": END}),
        dict(eos_token="</s>", additional_special_tokens=["<s>", END]),
        dict(eos_token="</s>", add_bos_token=True, tokenizer_class="Qwen2Tokenizer"),
        dict(eos_token="</s>", bos_token=None, pad_token=""),
    ],
)
def test_special_tokens_in_every_form_are_read(folder, settings):
    ours = folder(tokenizer_config=settings)
    assert ours.decode([ours.end]) == "</s>"
    assert ours.specials["eos_token"] == "</s>"
    known = {"eos_token", "image_token", "additional_special_tokens"}
    assert set(ours.specials) <= known


@parametrize(
    "settings",
    [
        dict(tokenizer_class="LlamaTokenizer"),
        dict(tokenizer_class="LlamaTokenizerFast", add_eos_token=True),
        dict(tokenizer_class="GemmaTokenizer", add_bos_token=False),
        dict(tokenizer_class="PreTrainedTokenizerFast", add_bos_token=True),
        dict(tokenizer_class="PreTrainedTokenizerFast", split_special_tokens=True),
        dict(added_tokens_decoder={"392": END | dict(rstrip=True, lstrip=True)}),
        dict(added_tokens_decoder={"395": END | dict(content="<new>")}),
        dict(added_tokens_decoder={"7": END | dict(content="Say", special=False)}),
        dict(pad_token="ana", extra_special_tokens={"image_token": "<image>"}),
    ],
)
def test_settings_change_ids_as_in_transformers(folder, tmp_path, settings):
    marks = dict(bos_token="<s>", eos_token="</s>", unk_token=None, pad_token=None)
    kind = dict(tokenizer_class="PreTrainedTokenizerFast")
    ours = folder(tokenizer_config=marks | kind | settings)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    known = theirs.special_tokens_map
    assert ours.specials == {name: value for name, value in known.items() if value}
    for text in ("Say banana </s>  yes<image>", "<new> <end>", "bananaSay "):
        assert ours.encode(text) == theirs(text)["input_ids"]
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_plain([text])[0].tolist() == plain


def behind(token):
    """Return the part of a tokenizer.json that puts a token behind each text."""
    text = dict(Sequence=dict(id="A", type_id=0))
    mark = dict(SpecialToken=dict(id=token, type_id=0))
    model = tokenizers.Tokenizer.from_str(byte_level())
    entry = dict(id=token, ids=[model.get_vocab_size() + 1], tokens=[token])
    return dict(
        type="TemplateProcessing",
        single=[text, mark],
        pair=[text, dict(Sequence=dict(id="B", type_id=0))],
        special_tokens={token: entry},
    )


@parametrize(
    ("files", "end", "stops"),
    [
        (dict(tokenizer_config=dict(eos_token="</s>")), "</s>", []),
        (dict(special_tokens_map=dict(eos_token=END)), "</s>", []),
        (dict(generation_config=dict(eos_token_id=[2, 3])), None, [2, 3]),
        (dict(generation_config=dict(eos_token_id=None)), None, []),
        (dict(change=dict(post_processor=behind("</s>"))), "</s>", []),
        # Transformers takes the older file, unless the settings list all tokens
        (
            dict(
                tokenizer_config=dict(eos_token="<s>"),
                special_tokens_map=dict(eos_token="</s>"),
            ),
            "</s>",
            [],
        ),
        (
            dict(
                tokenizer_config=dict(
                    eos_token="</s>", added_tokens_decoder={"9": END}
                ),
                special_tokens_map=dict(eos_token="<s>"),
            ),
            "</s>",
            [],
        ),
        # a token that no vocabulary has gets the next id
        (dict(tokenizer_config=dict(eos_token="<new>")), "<new>", []),
        ({}, None, []),
    ],
)
def test_an_end_that_one_file_names_is_the_end(folder, files, end, stops):
    ours = folder(**files)
    assert list(ours.stops) == stops
    if end is None:
        assert ours.end == (stops[0] if stops else None)
    else:
        made = example({"text": "Say"}, ours)
        assert ours.decode(made.ids) == "Say" + end
        assert made.ids[-1] == ours.end
        # nothing predicts the first token
        assert made.counted.tolist() == [False] + [True] * (len(made.ids) - 1)


@parametrize(
    ("files", "message"),
    [
        (dict(tokenizer_config=dict(eos_token={})), "eos_token is None"),
        (dict(tokenizer_config=dict(eos_token=3)), "eos_token is 3, and must be a str"),
        (dict(tokenizer_config=dict(extra_special_tokens=3)), "must be a dict"),
        (dict(tokenizer_config=dict(extra_special_tokens={"a": 1})), "a is 1"),
        (dict(tokenizer_config=dict(added_tokens_decoder=["a"])), "must be a dict"),
        (dict(tokenizer_config=dict(added_tokens_decoder={"x": END})), "'x'"),
        (
            dict(tokenizer_config=dict(added_tokens_decoder={"1": {"a": 1}})),
            "added_tokens_decoder is None",
        ),
        (dict(tokenizer_config=dict(chat_template=3)), "chat_template is 3"),
        (dict(tokenizer_config=dict(chat_template=[dict(template="x")])), "a name of"),
        (dict(tokenizer_config="[" * 100_000), "is not JSON"),
        (dict(tokenizer_config="[]"), "holds a list"),
        (dict(generation_config=dict(eos_token_id="</s>")), "is no id"),
        (dict(generation_config=dict(eos_token_id=[1, -1])), "is no id"),
        (dict(generation_config=dict(eos_token_id=2**31)), "is no id"),
        (dict(change=dict(model={})), "is not a tokenizer.json"),
    ],
)
def test_damaged_settings_are_named(folder, files, message):
    with refused(message):
        folder(**files)


@parametrize(
    "template",
    [
        "{% if tools is not none %}tools {{ tools }}{% endif %}TURNS",
        "{% if not tools is none %}{{ tools | tojson }}{% endif %}TURNS",
        "{% if documents != none or documents is undefined %}documents{% endif %}TURNS",
        "{{ strftime_now('%Y')[:2] }}{% if strftime_now is defined %}TURNS{% endif %}",
        "{{ messages | tojson }}{{ messages | tojson(ensure_ascii=True) }}",
        "{{ messages | tojson(indent=2, sort_keys=True) }}{{ [1] | tojson(False, 3) }}",
        "{{ {'a': [1, 2]} | tojson(separators=(',', ':')) }}",
        "{% set generation = messages | length %}{{ generation }}TURNS",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n"
        "  {%- if loop.first %}{% continue %}{% endif %} x {% endfor %}",
        "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}",
        "{{ bos_token }}{{ sep_token }}{{ additional_special_tokens | join('-') }}",
        "{{ image_token }}{% if add_generation_prompt is defined %}TURNS{% endif %}",
        "   {% if true %}  \n a {% endif %}\n{# note #}\n\n{{ eos_token }}\n",
        "{{ (messages | selectattr('role', 'equalto', 'user') | list) | length }}TURNS",
    ],
)
def test_templates_see_the_variables_of_transformers(folder, tmp_path, template):
    marks = dict(bos_token="<s>", eos_token="</s>", tokenizer_class="GPT2Tokenizer")
    ours = folder(
        tokenizer_config=marks
        | dict(
            additional_special_tokens=["<end>", "<s>"],
            extra_special_tokens={"image_token": "<image>"},
        ),
        chat_template=template.replace("TURNS", OWN_TURNS),
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    turns = [*HI, dict(role="assistant", content='Hé, <b>"2 & 3"</b>?', extra=[1.5])]
    assert ours.rendered(turns) == theirs.apply_chat_template(turns, tokenize=False)
    opened = theirs.apply_chat_template(HI, tokenize=False, add_generation_prompt=True)
    assert ours.rendered(HI, opened=True) == opened


TEMPLATES = dict(tool_use="tools", default=OWN_TURNS)


@parametrize(
    "several",
    [TEMPLATES, [dict(name=name, template=one) for name, one in TEMPLATES.items()]],
)
def test_of_several_templates_the_default_one_is_used(folder, several):
    ours = folder(tokenizer_config=dict(chat_template=several))
    assert ours.rendered(HI) == "<user>Hi\n"
    ours = folder(tokenizer_config=dict(chat_template={"tool_use": "tools"}))
    with refused("has no chat template"):
        ours.rendered(HI)


def test_the_first_token_of_a_chat_does_not_count(folder):
    ours = folder(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    made = example({"messages": [dict(role="assistant", content="Say it")]}, ours)
    assert made.counted.tolist() == [False] + [True] * (len(made.ids) - 1)


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ '' | attr('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ lipsum.__globals__['os'].system('touch PATH') }}",
    "{{ cycler.__init__.__globals__.os.system('touch PATH') }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
]


@parametrize("template", ESCAPES)
def test_templates_do_not_leave_their_sandbox(folder, tmp_path, template):
    ours = folder(chat_template=template.replace("PATH", str(tmp_path / "made")))
    try:
        found = ours.rendered(HI)
    except ValueError as error:
        found = str(error)
    # An attribute that is unsafe is undefined, and writes nothing
    assert not found or re.search("refuses .*(unsafe|not safely callable)", found)
    assert not (tmp_path / "made").exists()


LOOPS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
)


@parametrize(
    ("template", "message"),
    [
        (LOOPS.replace("BODY", ""), "stopped after 0.30"),
        (LOOPS.replace("BODY", "{{ 'text' * 999 }}"), "longer than 16,777,216 char"),
        ("{{ ('a' * 10**10) | length }}", "too much memory|status -"),
        ("{{ 10 ** (10 ** 10) }}", "stopped after"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        (
            "{% macro f() %}a{% generation %}b{% endgeneration %}{% endmacro %}"
            "{{ f() }}",
            "are not at the top level",
        ),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('No \n\x1b[31msystem') }}", r"No   \[31msystem"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
    ],
)
def test_templates_that_fail_or_run_for_ever_are_refused(
    folder, monkeypatch, template, message
):
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    monkeypatch.setattr(limits, "BYTES", 2**29)
    ours = folder(chat_template=template)
    with refused(message):
        ours.rendered(HI)
    # Another process takes the place of one that was stopped
    monkeypatch.setattr(limits, "SECONDS", 10)
    assert dataclasses.replace(ours, template=OWN_TURNS).rendered(HI) == "<user>Hi\n"


def replace(pattern, content):
    return dict(type="Replace", pattern=pattern, content=content)


@parametrize(
    ("steps", "message"),
    [
        ([replace(dict(String="a"), "aa")] * 40, "stopped after|ended with status"),
        ([replace(dict(Regex="(a+)+$"), "")], "retry-limit"),
    ],
)
def test_tokenizers_that_run_for_ever_are_stopped(folder, monkeypatch, steps, message):
    normalizer = dict(type="Sequence", normalizers=steps)
    settings = dict(eos_token="</s>")
    ours = folder(dict(normalizer=normalizer), tokenizer_config=settings)
    monkeypatch.setattr(limits, "SECONDS", 0.5)
    monkeypatch.setattr(limits, "BYTES", 2**29)
    for encode in (ours.encode, ours.places):
        with refused(f"the tokenizer .* fails: .*({message})"):
            encode("a" * 40 + "b")
    with refused(message):
        ours.encode_plain(["a" * 40 + "b"])
    assert ours.decode(ours.encode("S")) == "S"
