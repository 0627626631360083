"""Names of bulk objects: what `PUT /objects/NAME` and `GET /objects/NAME` carry."""


def contribution(learner: str, incarnation: int, fragment: int, round: int) -> str:
    return f"contribution.{learner}.{incarnation}.{fragment}.{round}"


def fragment(index: int, version: int) -> str:
    return f"fragment.{index}.{version}"


def seed(learner: str, incarnation: int, index: int) -> str:
    return f"seed.{learner}.{incarnation}.{index}"


def state(transfer: str) -> str:
    return f"state.{transfer}"
