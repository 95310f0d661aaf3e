"""Tokenizers in the form of Hugging Face, with the chat template of their folder.

tokenizer = read_tokenizer(Path("folder/tokenizer.json"))
tokenizer.encode("text")
tokenizer.rendered([{"role": "user", "content": "Hi"}])
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.sandbox
import numpy as np
import tokenizers

from tcfp_jax.inference import folders

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
LARGEST = 1 << 28  # bytes of a tokenizer.json; Gemma's has 33 million
# Files next to a tokenizer.json that belong to it.
COMPANIONS = (
    FILE,
    SETTINGS,
    TEMPLATE,
    "special_tokens_map.json",
    GENERATION,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the settings in its folder.

    Attributes:
      path: Its file.
      model: The `tokenizers.Tokenizer`.
      specials: Names such as "eos_token" and their text.
      template: Chat template, or None.
      stops: Ids at which an answer ends, besides `end`.
    """

    path: Path
    model: tokenizers.Tokenizer
    specials: Mapping[str, str]
    template: str | None
    stops: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of ids: the largest one and 1."""
        return max(self.model.get_vocab().values()) + 1

    @property
    def end(self) -> int | None:
        """The id that ends a text, or None."""
        text = self.specials.get("eos_token")
        found: int | None = None if text is None else self.model.token_to_id(text)
        return found

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with those that the tokenizer puts before and
        behind it.
        """
        return list(self.model.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special ones included."""
        return str(
            self.model.decode([int(one) for one in ids], skip_special_tokens=False)
        )

    def rendered(
        self, messages: Sequence[Mapping[str, Any]], *, opened: bool = False
    ) -> str:
        """Return a conversation as the chat template writes it, `opened` with the
        beginning of an answer.

        Raises:
          ValueError: the tokenizer has no template, or the template refuses the
            conversation.
        """
        if self.template is None:
            raise ValueError(
                f'{self.path.parent} has no chat template; give {{"text": ...}} instead'
                " of messages"
            )
        try:
            return _compiled(self.template).render(
                messages=messages, add_generation_prompt=opened, **self.specials
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template refuses the conversation: {error}"
            ) from error

    def prompt(self, text: str) -> list[int]:
        """Return the ids that ask a model: a question if there is a chat template, else
        the text itself.
        """
        if self.template is None:
            return self.encode(text)
        whole = self.rendered([{"role": "user", "content": text}], opened=True)
        return list(self.model.encode(whole, add_special_tokens=False).ids)


@functools.lru_cache(maxsize=8)
def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, with the settings that lie next to
    it.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: a file is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no tokenizer {path}; name a tokenizer.json of Hugging Face's"
            " tokenizers"
        )
    try:
        content = folders.read_bytes(path.parent, path.name, LARGEST)
        model = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises bare exceptions
        raise ValueError(
            f"{path} is not a tokenizer.json of Hugging Face's tokenizers: {error}"
        ) from error
    model.no_padding()
    model.no_truncation()
    found = _object(path.parent, SETTINGS)
    # one id, or several
    stops = np.ravel(_object(path.parent, GENERATION).get("eos_token_id", ()))
    specials: dict[str, str] = {}
    for name, one in found.items():
        text = one["content"] if isinstance(one, dict) else one
        if "token" in name and isinstance(text, str):
            specials[name] = text
    template = found.get("chat_template")
    if path.with_name(TEMPLATE).is_file():
        template = folders.read_bytes(path.parent, TEMPLATE).decode()
    if isinstance(template, list):  # several by name
        named = {one["name"]: one["template"] for one in template}
        template = named.get("default")
    return Tokenizer(path, model, specials, template, tuple(stops.astype(int).tolist()))


def _object(folder: Path, name: str) -> dict[str, Any]:
    """Return the object of a JSON file, empty if there is none."""
    if not (folder / name).is_file():
        return {}
    found: dict[str, Any] = folders.read_object(folder, name)
    return found


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    """Return a template in the environment of Transformers."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The template comes with a downloaded model, so it runs in a sandbox.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    # Without today's date, of which templates ask if it is there: the tokens of a file
    # would change every day.
    environment.globals["raise_exception"] = refuse
    # Transformers' own tags around answers; `models.training.examples` finds answers
    # without them.
    plain = re.sub(r"endgeneration\s*(-?%})", r"endif \1", template)
    plain = re.sub(r"generation\s*(-?%})", r"if true \1", plain)
    return environment.from_string(plain)
