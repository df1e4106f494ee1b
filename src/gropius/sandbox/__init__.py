"""Running programs that a model wrote, isolated from the machine that trains it.

base.py      limits, reasons, what a grade is
tiers.py     the ways to isolate, strongest first, and how each starts a process
seccomp.py   the system calls that are refused
confine.py   Landlock and seccomp applied by the process to itself (runs inside, where bubblewrap is forbidden)
driver.py    runs the program and answers over a pipe (runs inside)
session.py   one isolated process: ask, answer, deadline, death
remote.py    a service elsewhere behind the same interface
values.py    plain values over the pipe, compared by type and value
questions.py data-set tests as questions to the program
grade.py     a program and its tests → a grade
check.py     the self-test behind `gropius sandbox`
"""
