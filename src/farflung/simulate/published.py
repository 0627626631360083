"""The papers' tables: Decoupled DiLoCo (arXiv 2604.21428) as readers report it, Streaming DiLoCo (2501.18512)."""

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)

TABLE1: dict[tuple[str, int], tuple[int, ...]] = {
    ("data_parallel", 1): (72, 57, 38, 27, 18),
    ("elastic_data_parallel", 1): (88, 80, 69, 58, 40),
    ("decoupled", 2): (94, 88, 80, 70, 54),
    ("decoupled", 4): (96, 93, 89, 82, 73),
    ("decoupled", 8): (98, 96, 94, 88, 80),
    ("decoupled", 16): (99, 98, 96, 93, 86),
}
"""Decoupled DiLoCo, Table 1: (method, learners) -> goodput in percent at each of `CHIPS`; MTBI a year."""

TABLE4: dict[str, tuple[float, ...]] = {
    "data_parallel": (1.07, 1.09, 1.02, 0.80),
    "decoupled": (0.90, 0.83, 0.75, 0.62),
}
"""Decoupled DiLoCo, Table 4: time to the same tokens with extra compute part of the time, without it = 1."""
EXTRA = (0.25, 0.5, 1.0, 3.0)  # of the 4 learners' compute

TABLE5: dict[str, int] = {"K = M": 84, "K = 1": 100, "K = 1 with grace": 100}
"""Decoupled DiLoCo, Table 5: goodput in percent of 8 learners, the slowest 18 % slower, 10 % variance injected."""

UTILISATIONS = (0.50, 0.80, 0.90, 0.95, 0.99)
BANDWIDTH_MODELS: dict[str, tuple[float, int, float]] = {
    "1B": (1e9, 24, 0.1),
    "10B": (10e9, 48, 0.8),
    "100B": (100e9, 108, 4.9),
}
"""Streaming DiLoCo, Table 4: parameters, layers, seconds of a step."""

BANDWIDTH: dict[tuple[str, str], tuple[float, ...]] = {
    ("1B", "data_parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "streaming, overlap"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "streaming, overlap, 4 bit"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data_parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "diloco"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming, overlap, 4 bit"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data_parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "diloco"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming, overlap, 4 bit"): (0.5, 0.9, 1.1, 1.1, 1.4),
}
"""Streaming DiLoCo, Table 4: (model, method) -> Gbit/s needed for each of `UTILISATIONS`; H = 100."""
