"""Which method, M, H, P, tau, K and codec for given islands, links and failures; and how a run compares with that.

setting, reading    what is to be planned for: islands, links, failures, budget; from flags, a file, a recipe
candidate           the choices: a method's policy on so many learners
exchange            closed forms: what an exchange moves, how long it takes, whether it fits, what it costs a cycle
quality             what the studies in docs/results measured of a choice's loss; nothing else is claimed
judging             candidates from closed forms, the best of them in the simulator; what limits each; an order
show                the table
past                a finished run as a prediction may know it
rehearsal, check    that run rehearsed by its own machines under virtual time; predicted beside measured
verbs               the command line
"""
