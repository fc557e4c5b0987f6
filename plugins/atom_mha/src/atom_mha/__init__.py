"""Grouped-query softmax attention for Atom.

`plugin` is the table of contents. `claim` decides about modules with the help of `forward_facts` (what a module's
forward does), `mask_facts` (which mask its model builds) and `heads` (shapes). `layer` runs, `step_plan` is its
per-step metadata, `layout` its cache, and `kernels` holds the ops.
"""
