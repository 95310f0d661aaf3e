"""Settings that lie next to a tokenizer.json, read as Transformers reads them: special
tokens, tokens to add, marks around a text, the chat template, and ends of answers.

The functions take the objects of the files. They raise `ValueError` and `TypeError` if
these hold something else than Transformers writes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import processors

Named = dict[str, str | list[str]]
# Special tokens of Transformers. Templates see their texts by these names.
NAMES = tuple(
    f"{one}_token" for one in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
LIST = "additional_special_tokens"
# Special tokens of one model by names of its own; version 5 also writes a list.
TABLES = ("extra_special_tokens", "model_specific_special_tokens")
ADDED = "added_tokens_decoder"
# Classes of Transformers that write the marks around a text anew.
MARKING = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
PROPERTIES = ("lstrip", "rstrip", "normalized", "single_word", "special")
MOST_ID = 2**31 - 1


def special_tokens(settings: Mapping[str, Any], older: Mapping[str, Any]) -> Named:
    """Return the texts of special tokens by name.

    Args:
      settings: Object of `tokenizer_config.json`.
      older: Object of `special_tokens_map.json`. It wins, as in Transformers, unless
        the settings list all added tokens.
    """
    files = [older, settings] if settings.get(ADDED) else [settings, older]
    named: Named = {}
    for file in files:
        for name, value in _entries(file):
            if name == LIST or isinstance(value, list):
                named[LIST] = [_text(LIST, one) for one in _checked(name, value, list)]
            elif value is not None and _text(name, value):
                named[name] = _text(name, value)
    return named


def _entries(file: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a file that are special tokens."""
    for table in TABLES:
        found = file.get(table)
        if isinstance(found, list):
            yield table, found
        elif found is not None:
            yield from _checked(table, found, dict).items()
    for name in (*NAMES, LIST):
        if file.get(name) is not None:
            yield name, file[name]


def _text(name: str, value: Any) -> str:
    """Return the text of a token, which is an object where it has properties."""
    content = value.get("content") if isinstance(value, dict) else value
    return str(_checked(name, content, str))


def _checked(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r:.80}, and must be a {kind.__name__}")
    return value


def complete(
    model: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Named
) -> None:
    """Change a tokenizer as Transformers does when it reads a folder.

    It adds tokens that only the settings name, and classes of Llama and Gemma write the
    marks before and after a text.
    """
    model.no_padding()
    model.no_truncation()
    texts: list[str] = []
    for value in named.values():
        texts += value if isinstance(value, list) else [value]
    added: list[tokenizers.AddedToken] = []
    table = _checked(ADDED, settings.get(ADDED) or {}, dict)
    for place in sorted(table, key=int):
        entry = _checked(ADDED, table[place], dict)
        properties = {name: entry[name] for name in PROPERTIES if name in entry}
        token = tokenizers.AddedToken(_text(ADDED, entry), **properties)
        added.append(token)
    model.add_tokens(added)
    held = {token.content for token in model.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(texts) if text not in held]
    model.add_special_tokens(missing)
    model.encode_special_tokens = bool(settings.get("split_special_tokens"))
    if str(settings.get("tokenizer_class")).removesuffix("Fast") in MARKING:
        _write_marks(model, settings, named)


def _write_marks(
    model: tokenizers.Tokenizer, settings: Mapping[str, Any], named: Named
) -> None:
    pieces = ["$A:0"]
    ids = []
    for name, wanted, place in (("bos_token", True, 0), ("eos_token", False, 2)):
        text = named.get(name)
        if settings.get(f"add_{name}", wanted) and isinstance(text, str):
            pieces.insert(place, f"{text}:0")
            ids.append((text, model.token_to_id(text)))
    model.post_processor = processors.TemplateProcessing(
        single=pieces, special_tokens=ids
    )


def chat_template(settings: Mapping[str, Any]) -> str | None:
    """Return the template of `tokenizer_config.json`, of several the default one."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        entries = [_checked("chat_template", one, dict) for one in found]
        found = {one.get("name"): one.get("template") for one in entries}
    if isinstance(found, dict):
        for name, template in found.items():
            _checked("a name of chat_template", name, str)
            _checked("chat_template", template, str)
        found = found.get("default")
    return None if found is None else str(_checked("chat_template", found, str))


def stops(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids of `generation_config.json` at which an answer ends: none, one, or
    several.
    """
    found = settings.get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    for one in ids:
        whole = isinstance(one, int) and not isinstance(one, bool)
        if one is not None and not (whole and 0 <= one <= MOST_ID):
            raise ValueError(f"eos_token_id={found!r:.80} is no id, and no list of ids")
    return tuple(one for one in ids if one is not None)
