from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.view.trajectory import token_texts

BYTES = {0: b"caf", 1: b"\xc3", 2: b"\xa9", 3: b" \xe2\x82", 4: b"\xac", 5: b"\xff", 6: b"ok"}


def bytes_decode(ids: list[int]) -> str:
    return b"".join(BYTES[i] for i in ids).decode("utf-8", errors="replace")


def test_characters_split_over_tokens_are_shown_whole():
    assert token_texts([0, 1, 2, 6, 3, 4, 6], bytes_decode) == [
        "caf", "é", "", "ok", " €", "", "ok",
    ]  # fmt: skip
    assert token_texts([5, 6], bytes_decode) == ["\ufffd", "ok"]
    assert token_texts([], bytes_decode) == []


def test_leading_spaces_survive_a_decoder_that_strips_them():
    pieces = ["▁the", "▁cat", "s", "▁", "!"]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")

    assert token_texts([0, 1, 2, 0, 4], decode) == ["the", " cat", "s", " the", "!"]


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 6), max_size=20))
def test_token_texts_never_lose_their_place(ids):
    texts = token_texts(ids, bytes_decode)
    assert len(texts) == len(ids)
    whole = bytes_decode(ids)
    if "\ufffd" not in whole:
        assert "".join(texts) == whole
