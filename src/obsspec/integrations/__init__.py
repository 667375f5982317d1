"""Speculation inside other people's training frameworks, one module each; importing one needs its framework."""
