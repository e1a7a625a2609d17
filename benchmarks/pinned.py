"""Pins the instruction set, when it is imported: before torch and anything that computes a number."""

import os

for variable, value in {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}.items():
    os.environ.setdefault(variable, value)
