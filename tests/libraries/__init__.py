"""Modules of libraries built on Lightning, trained unmodified on every layout: ``make libraries``.

Each library has an environment of its own (:mod:`tests.libraries.environments`) and a file of rows
(``tests/libraries/<library>.py``), which imports it. See :mod:`tests.libraries.base` for how to write rows.
"""
