"""`shoal doctor`: what is wrong with a machine or a cluster, and what to do.

A check looks at something and judges what it saw: the looking is a function without a judgement, the judging a pure
function from what was seen to a `Finding`.
"""
