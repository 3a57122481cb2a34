"""Fuzzing of LoRA files: generated files, most of them nearly right, against tiny models of every kind of module.

    tensors.py     what a file holds, and valid files as trainers write them
    changes.py     what can be wrong with keys, shapes, dtypes, values, alphas
    container.py   tensors -> bytes, and what can be wrong with those
    cases.py       the hypothesis strategy of it all
    harness.py     what must hold for each: an effect or a refusal, never anything else
    nightly.py     the command for very many of them
    coverage_guided.py   the same strategy and harness, driven by atheris
"""
