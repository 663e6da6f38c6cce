"""Samples of a producer that go by reference: put into payload stores, or there already."""
