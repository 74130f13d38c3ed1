"""Tests of rlexp.generate."""
