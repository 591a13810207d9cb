"""The scenarios of all modules, by name."""

from conformance.features import *  # noqa: F403
from conformance.queue_scenarios import *  # noqa: F403
from conformance.scenarios import *  # noqa: F403
from conformance.unreliable_scenarios import *  # noqa: F403
from conformance.window_scenarios import *  # noqa: F403
from conformance.xrc_scenarios import *  # noqa: F403

NAMES = sorted({name.removesuffix("_passive") for name in list(globals()) if name.endswith("_passive")} - {"features"})
