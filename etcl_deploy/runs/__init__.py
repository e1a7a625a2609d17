"""Runs on disk: build, learn, resume, add, compare, bundle."""
