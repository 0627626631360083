"""Goodput of runs too large to try: islands of many chips, failures, links, and the decisions of real machines.

returns, cluster     what is put in: chips, failures, returns, reconfigurations, outages
life, outages        when each island runs: event by event, an island at a time
scenario             a method on a cluster, and what must be true of it
hub, rounds          rounds of decoupled, diloco and streaming: opened and closed by `protocol.rounds`
gossip               rounds of gasloc: pairs by `core.mixing`
outcome, simulating  goodput, uptime, breadth, bytes, time lost by cause, with confidence intervals
utilisation          how much of a step's time is compute, at a given bandwidth
published, presets   the papers' tables, and ours beside them
trace                failures as a fault plan that `lab` and `run` execute
verbs, show          the command line, and what it prints
"""
