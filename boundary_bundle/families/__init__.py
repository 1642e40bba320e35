"""Every architecture of llama.cpp: tiny models of each, and what crosses its boundaries.

models    tiny GGUF files of every architecture, written by a program on the unpatched library
"""
