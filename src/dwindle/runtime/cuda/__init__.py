"""Packed execution on a GPU: only live rows are computed, and the host never asks how many they are."""
