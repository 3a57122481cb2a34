"""Literals that are looked for before regexes are: nothing is found less for it, whatever a log holds."""

import random
import re

import failures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qpatch.doctor import log_messages, log_text
from qpatch.doctor.log_literals import literals
from qpatch.hooks.signatures import SIGNATURES, Signature

BY_NAME = {signature.name: signature for signature in SIGNATURES}


@pytest.mark.parametrize("pattern, found", [
    ("abc", ("abc",)), (r"ab\.c\(\)", ("ab.c()",)), ("abc|de", ("abc", "de")), ("ab[cd]efg", ("efg",)),
    ("abcd?e", ("abc",)), ("abc*de", ("ab",)), ("abc+de", ("ab",)), ("abc{0,2}de", ("ab",)), ("ab{c", ("ab{c",)),
    ("abc(def|ghi)?jk", ("abc",)), ("ab(c(d)ef)ghi", ("ghi",)), (r"ab(\)c)de\)", ("de)",)), ("^abc$", ("abc",)),
    (r"ab\wcde\b", ("cde",)), ("[]|]abc|[^]|]de", ("abc", "de")), ("(?:abc)d", ("d",)), ("(?=abc)", ()), ("a?", ()),
    ("abc|d*", ()), ("(?i)abc", ()), ("(?x) abc", ()), ("ab.cd.e", ("ab",)), ("abc??d", ("ab",)),
])
def test_a_literal_is_the_longest_text_that_an_alternative_cannot_do_without(pattern, found):
    assert literals(re.compile(pattern)) == found


@pytest.mark.parametrize("name", BY_NAME)
def test_whatever_the_message_of_a_signature_finds_has_one_of_its_literals(name):
    message = BY_NAME[name].message
    found = literals(re.compile(message))
    # With none, or one that stands everywhere, each line of a log would be searched for it.
    assert found and min(map(len, found)) >= 4

    @settings(max_examples=60, deadline=None)
    @given(st.from_regex(message))
    def check(text):
        assert any(literal in text for literal in found)

    check()


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_each_line_has_the_findings_that_all_regexes_would_give_it(batch, monkeypatch):
    monkeypatch.setattr(log_messages, "_BATCH", batch)
    texts = [text for log in [*failures.LOGS.values(), *failures.STRANGERS.values()] for text in log.split("\n")]
    texts += ["got prompt", "", "100%|####| 20/20 [00:05<00:00, 3.9it/s]"] * 100
    random.Random(0).shuffle(texts)
    lines = list(log_text.lines(texts))
    found = list(log_messages.Messages(SIGNATURES).over(lines))
    assert [line for line, _ in found] == lines
    for line, candidates in found:
        wanted = [(signature, match) for signature in SIGNATURES if (match := re.search(signature.message, line.text))]
        wanted = [(one.name, match.span()) for one, match in wanted if one.holds is None or one.holds(match)]
        assert [(one.name, match.span()) for one, match in candidates] == wanted
    assert sum(bool(candidates) for _, candidates in found) > 40


def test_a_message_without_a_literal_is_looked_for_in_every_line():
    signatures = [Signature("some", "(?i)PROMPT|HIN", ""), Signature("none", "zzzz", "")]
    found = log_messages.Messages(signatures).over(log_text.lines(["got prompt", "nothing", "else"]))
    assert [[one.name for one, _ in candidates] for _, candidates in found] == [["some"], ["some"], []]
