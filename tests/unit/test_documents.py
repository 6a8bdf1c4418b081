import pytest

from launch.documents import Document, parse

VALUES = {"n": 3, "x": 0.5, "t": "a\nb", "l": [1, 2.5], "o": {"n": -1}, "none": None, "yes": True}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 19, "1" + "0" * 5000])
def test_numbers_that_nothing_can_count_with_are_refused(number):
    with pytest.raises(ValueError, match="is not a number that JSON can hold") as refused:
        parse(f'{{"a": [{number}]}}')
    assert len(str(refused.value)) < 100


def test_what_is_nested_too_deeply_is_refused_as_other_malformed_texts_are():
    for text in ("[" * 100_000, "{", ""):
        with pytest.raises(ValueError, match=r"nested|Expecting"):
            parse(text)


def test_values_of_the_right_type_and_range_are_read():
    document = Document(VALUES)
    assert (document.number("n", 0, 3), document.whole("n", 3), document.number("x", 0, 1)) == (3.0, 3, 0.5)
    assert (document.text("t"), document.numbers("l", 0, 3)) == ("a\nb", (1, 2.5))
    assert document.within("o").whole("n", -1) == -1
    assert (document.optional_number("none", 0, 1), document.optional_text("missing")) == (None, None)


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (lambda it: it.number("t", 0, 1), "t is 'a\\nb', not a number"),
        (lambda it: it.number("yes", 0, 1), "yes is True, not a number"),
        (lambda it: it.number("n", 0, 2.5), "n is 3, not from 0 to 2.5"),
        (lambda it: it.whole("x", 0), "x is 0.5, not a whole number"),
        (lambda it: it.whole("missing", 0), "missing is missing, not a whole number"),
        (lambda it: it.optional_number("n", 4, 5), "n is 3, not from 4 to 5"),
        (lambda it: it.numbers("l", 0, 2), "l[1] is 2.5, not from 0 to 2"),
        (lambda it: it.list("o"), "o is {'n': -1}, not a list"),
        (lambda it: it.text("l"), "l is [1, 2.5], not a text"),
        (lambda it: it.within("o").number("n", 0, 1), "o.n is -1, not from 0 to 1"),
        (lambda it: it.within("l"), "l is [1, 2.5], not an object"),
        (lambda _: Document([], "it"), "it is [], not an object"),
        (lambda _: Document({"t": "a" * 5000}, "it").text("t"), "it.t has more than 4096 characters"),
    ],
)
def test_others_are_refused_by_their_key(read, line):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the whole line follows)
        read(Document(VALUES))
    assert str(refused.value) == line
