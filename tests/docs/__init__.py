"""Tests of the project's pages: they render, their links work, their commands run."""
