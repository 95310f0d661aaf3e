"""Where the answers of a conversation are in the text that a chat template writes.

No text is searched for: an answer's words may also be in the question, or in the mark
that ends it, and a template may drop a part of them. One character that occurs nowhere
takes the place of an answer instead, and the rendered text shows where it is:

    whole   <user>Say banana<assistant>banana<end>
    probe   <user>Say banana<assistant>X<end>
"""

from collections.abc import Sequence

from ..huggingface.limits import Rendering
from ..huggingface.tokenizer import Messages, Tokenizer

PRIVATE_USE = range(0xE000, 0xF900)


def answers(
    messages: Messages, tokenizer: Tokenizer
) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation as text, and where the answers of the assistant begin and
    end in it.

    They are where the template's own tags `{% generation %}` are. Without tags, an
    answer begins where the template asks for it, and ends with the text that follows
    it whatever comes next.

    Raises:
      ValueError: the template refuses the conversation, or drops an answer.
    """
    places = []
    if not tokenizer.marks_answers:
        places = [i for i, one in enumerate(messages) if one["role"] == "assistant"]
    used = repr((messages, tokenizer.template))
    probe = next(one for one in map(chr, PRIVATE_USE) if one not in used)
    conversations = [(messages, False)]
    for place in places:
        conversations += _variants(messages, place, probe)
    found = tokenizer.renderings(conversations)
    whole = found[0].checked()
    spans = [(begin, end) for begin, end in found[0].spans]
    for i, place in enumerate(places):
        span = _span(whole, found[1 + 4 * i :][:4], probe, tokenizer)
        if span is None:
            raise ValueError(
                f"the chat template drops or changes the content of message {place};"
                ' give the conversation as {"text": ...}'
            )
        spans.append(span)
    return whole, spans


def _variants(
    messages: Messages, place: int, probe: str
) -> list[tuple[Messages, bool]]:
    """Return the conversations that show where the answer of a message is."""
    probed = list(messages)
    probed[place] = {**messages[place], "content": probe}
    return [
        (messages[:place], True),
        (probed, False),
        (probed[: place + 1], False),
        (probed[: place + 1], True),
    ]


def _span(
    whole: str, variants: Sequence[Rendering], probe: str, tokenizer: Tokenizer
) -> tuple[int, int] | None:
    """Return where an answer begins and ends in a conversation; None if the template
    changes something else with it.
    """
    asked, *probed = variants
    parts = [one.text.partition(probe) for one in probed]
    (before, mark, behind), alone, _ = parts
    if not (mark and alone[1] and whole.endswith(behind)):
        return None
    begin = len(before)
    # A template may refuse to ask, e.g. at the beginning
    if asked.error is None and whole.startswith(asked.text):
        begin = len(asked.text)
    elif not whole.startswith(before):
        return None
    end = len(whole) - len(behind)
    tails = [tail for _, mark, tail in parts if mark]
    return (begin, end + _shared(tails, tokenizer)) if begin <= end else None


def _shared(tails: Sequence[str], tokenizer: Tokenizer) -> int:
    """Return how much of the texts after an answer belongs to it.

    They are the text after it in the whole conversation, in one that ends with it, and
    in one that asks for another answer.
    """
    whole, alone, *_ = tails
    if all(tail.startswith(alone) for tail in tails):
        return len(alone)
    # A mark is behind the last message alone, and roles may begin alike: <|user|>,
    # <|assistant|>. Their tokens differ.
    encoded = [tokenizer.places(tail) for tail in tails]
    same = 0
    for ids in zip(*(one.ids.tolist() for one in encoded), strict=False):
        if len(set(ids)) > 1:
            break
        same += 1
    if same:
        return int(encoded[0].ends[same - 1])
    return len(alone) if whole == alone else 0
