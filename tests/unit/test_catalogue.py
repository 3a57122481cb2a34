"""The catalogue is data; these are the rules that the data must keep."""

from qpatch import catalogue, finder


def test_the_finder_watches_exactly_the_catalogue_s_targets():
    assert finder.TARGETS == catalogue.patterns()
