"""The record of a run: what arrived, was planned and took how long, in files to look at later."""
