"""Mixtures of experts as data: the configuration of one layer's, and how families differ in theirs."""
