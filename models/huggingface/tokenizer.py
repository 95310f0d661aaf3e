"""Tokenizers in the form of Hugging Face, with the chat template of their folder.

tokenizer = read_tokenizer(Path("folder/tokenizer.json"))
tokenizer.encode("text")
tokenizer.rendered([{"role": "user", "content": "Hi"}])

Ids, templates and their variables are those of Transformers. The folder may come from a
stranger, so its tokenizer and its template run with limits
(`models.huggingface.limits`).
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tokenizers

from tcfp_jax.inference import folders

from . import limits, specials

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
SPECIALS = "special_tokens_map.json"
GENERATION = "generation_config.json"
LARGEST = 1 << 28  # bytes of a tokenizer.json; Gemma's has 33 million
# Files next to a tokenizer.json that belong to it.
COMPANIONS = (
    FILE,
    SETTINGS,
    TEMPLATE,
    SPECIALS,
    GENERATION,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)

Messages: TypeAlias = Sequence[Mapping[str, Any]]
_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and the settings in its folder.

    Attributes:
      path: Its file.
      model: The `tokenizers.Tokenizer`.
      specials: Names such as "eos_token" and their text, or a list of texts.
      template: Chat template, or None.
      end: The id that ends a text, or None.
      stops: Ids at which an answer ends, besides `end`.
      date: Day that templates see as today, such as "2026-11-28"; None is now.
    """

    path: Path
    model: tokenizers.Tokenizer
    specials: Mapping[str, str | list[str]]
    template: str | None
    end: int | None = None
    stops: tuple[int, ...] = ()
    date: str | None = None

    @property
    def size(self) -> int:
        """Number of ids: the largest one and 1."""
        return max(self.model.get_vocab().values()) + 1

    @property
    def tells_the_date(self) -> bool:
        """If its chat template writes the date, so that texts change every day."""
        return "strftime_now" in (self.template or "")

    @property
    def marks_answers(self) -> bool:
        """If its chat template has tags around answers."""
        return _TAG.search(self.template or "") is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with those that the tokenizer puts before and
        after it.

        Raises:
          ValueError: the tokenizer fails, or reaches a limit.
        """
        return list(self._of_file(limits.encoded, [text], True)[0].tolist())

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of texts, uint32, without those before and after.

        Raises:
          ValueError: as `encode`.
        """
        return list(self._of_file(limits.encoded, texts))

    def places(self, text: str) -> limits.Encoded:
        """Return the ids of a text, as `encode_plain`, and their places in it.

        Raises:
          ValueError: as `encode`.
        """
        found: limits.Encoded = self._of_file(limits.encoded_with_offsets, text)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special ones included.

        Raises:
          ValueError: as `encode`.
        """
        return str(self._of_file(limits.decoded, ids))

    def _of_file(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(self.model, *arguments)
        except ValueError as error:
            raise ValueError(f"the tokenizer {self.path} fails: {error}") from error

    def rendered(self, messages: Messages, *, opened: bool = False) -> str:
        """Return a conversation as the chat template writes it, `opened` with the
        beginning of an answer.

        Raises:
          ValueError: the tokenizer has no template, or the template refuses the
            conversation.
        """
        return self.renderings([(messages, opened)])[0].checked()

    def renderings(
        self, conversations: Sequence[tuple[Messages, bool]]
    ) -> list[limits.Rendering]:
        """Return conversations, opened or not, as the chat template writes them or with
        the reason why it refuses them.

        Raises:
          ValueError: the tokenizer has no template, or the template reaches a limit.
        """
        if self.template is None:
            raise ValueError(
                f'{self.path.parent} has no chat template; give {{"text": ...}} instead'
                " of messages"
            )
        # The variables of Transformers
        variables = [
            dict(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=opened,
                **self.specials,
            )
            for messages, opened in conversations
        ]
        try:
            return limits.rendered(self.template, variables, self.date)
        except (ValueError, TypeError) as error:
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
        return list(self.encode_plain([whole])[0].tolist())


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
    folder = path.parent
    settings = _object(folder, SETTINGS)
    try:
        named = specials.special_tokens(settings, _object(folder, SPECIALS))
        specials.complete(model, settings, named)
        template = specials.chat_template(settings)
        stops = specials.stops(_object(folder, GENERATION))
        if (folder / TEMPLATE).is_file():
            template = folders.read_bytes(folder, TEMPLATE).decode()
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the files of the tokenizer in {folder} are damaged: {error}; copy the"
            " model's own"
        ) from error
    found = Tokenizer(path, model, named, template, stops=stops)
    return dataclasses.replace(found, end=_end(found))


def _end(tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a text: the one that settings name, else the one that
    tokenizer.json puts after a text, else the first at which an answer ends.
    """
    named = tokenizer.specials.get("eos_token")
    if isinstance(named, str):
        found: int | None = tokenizer.model.token_to_id(named)
        return found
    if tokenizer.model.num_special_tokens_to_add(False):
        plain = tokenizer.encode_plain(["a"])[0].tolist()
        marked = tokenizer.encode("a")
        if plain and marked[-len(plain) :] != plain:
            return marked[-1]
    return tokenizer.stops[0] if tokenizer.stops else None


def _object(folder: Path, name: str) -> dict[str, Any]:
    """Return the object of a JSON file, empty if there is none."""
    if not (folder / name).is_file():
        return {}
    found: dict[str, Any] = folders.read_object(folder, name)
    return found
