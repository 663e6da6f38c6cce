"""Built-in length profiles: how long real rollouts and requests are, as quantile tables.

Each profile is the distribution of prompt plus response tokens of one public trace, at the
probabilities of `PROBABILITIES` (dense in the upper tail, where the trouble is), and names its
source and licence. Sampling inverts it with linear interpolation: the Kolmogorov-Smirnov distance
from the trace is about 0.01 or less, and lengths stay between the trace's shortest and longest.
"""

from dataclasses import dataclass, field

import numpy as np

from rollout_dispatcher.errors import ConfigError
from rollout_planner.types import FloatArray, IntArray

#: In 64ths: every one up to 60, then closer and closer.
_TAIL = (60, 60.5, 61, 61.5, 62, 62.5, 62.75, 63, 63.25, 63.5, 63.68, 63.84, 63.92, 63.968, 64)
PROBABILITIES: FloatArray = np.array([*range(60), *_TAIL]) / 64


@dataclass(frozen=True)
class Profile:
    """Quantiles of the tokens of a sample, one for each of `PROBABILITIES`."""

    name: str
    what: str
    source: str
    licence: str
    table: str = field(repr=False)

    @property
    def quantiles(self) -> IntArray:
        """int64[75], ascending."""
        return np.array(self.table.split(), dtype=np.int64)


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "lineage",
            "19 open-weight reasoning models on logic puzzles; API token counts",
            "fairydreaming/lineage-bench at 82f9417d",
            "MIT",
            """
            512 802 998 1214 1384 1657 1881 2111 2318 2536 2704 2828 3019 3233 3423 3624 3844 3994
            4208 4448 4648 4874 5169 5464 5806 6095 6350 6667 6924 7226 7508 7715 8012 8276 8589
            8847 9125 9369 9689 9977 10285 10579 10799 11186 11511 11808 12104 12480 13083 13475
            13991 14461 15092 15718 16375 17134 17821 18803 20185 22416 24928 26150 28854 31829
            34209 42634 52922 66323 66554 66982 66995 67017 67020 67020 67024
            """,
        ),
        Profile(
            "reasoning-gym",
            "RL-trained Qwen2.5-3B and its base on procedural tasks, 3 answers a prompt, cap 2048",
            "open-thought/reasoning-gym-eval at 5f09fecc",
            "Apache-2.0",
            """
            21 54 64 76 84 90 96 103 110 117 123 130 137 144 150 157 166 174 183 192 200 206 213 220
            227 235 243 252 260 269 277 285 293 302 310 318 326 335 344 353 364 376 390 404 420 438
            459 480 505 533 563 597 632 672 732 819 924 1037 1280 1598 1763 1883 2123 2195 2247 2460
            2774 3121 3609 4448 5088 6383 8540 11739 14724
            """,
        ),
        Profile(
            "azure-conv",
            "a production chat service",
            "Azure/AzurePublicDataset AzureLLMInferenceTrace_conv at b469a113",
            "CC-BY-4.0",
            """
            64 171 256 291 319 340 364 380 408 426 440 452 464 475 482 487 491 496 501 505 510 516
            524 534 549 591 909 1038 1213 1337 1379 1398 1412 1423 1433 1442 1451 1458 1466 1473
            1481 1490 1497 1505 1514 1523 1533 1545 1558 1574 1596 1621 1663 1735 1896 2117 2398
            2695 3095 4111 4125 4131 4138 4148 4159 4175 4188 4207 4237 4359 4915 5489 6112 6649
            14089
            """,
        ),
        Profile(
            "azure-code",
            "a production code-completion service: long prompts, short answers",
            "Azure/AzurePublicDataset AzureLLMInferenceTrace_code at b469a113",
            "CC-BY-4.0",
            """
            12 45 71 92 108 129 158 184 208 238 278 325 378 420 492 554 604 668 733 788 849 903 946
            992 1040 1074 1119 1163 1219 1298 1367 1419 1493 1560 1639 1701 1762 1837 1912 1995 2085
            2156 2232 2314 2400 2467 2558 2664 2774 2892 3008 3190 3355 3594 3818 4119 4460 4806
            5533 6060 6520 7034 7425 7443 7445 7448 7449 7453 7458 7469 7479 7502 7562 7578 7841
            """,
        ),
        Profile(
            "deepseek-r1-arc",
            "DeepSeek-R1 chains of thought on ARC-AGI puzzles",
            "arcprize/arc-agi-benchmarking at 09196ae0",
            "MIT; its puzzles Apache-2.0",
            """
            991 1300 1420 1577 1698 1893 1996 2058 2224 2323 2518 2702 2934 3154 3418 3566 3746 3956
            4015 4302 4465 4529 4583 4881 5358 5735 5949 6376 6704 7196 8212 8387 8720 9133 9834
            10158 10412 11082 11274 11501 11638 11778 12145 12359 12448 12738 12949 13027 13199
            13473 13607 13674 13886 14169 14354 14448 14522 14709 15089 15178 15403 15547 15857
            16100 16280 16422 16732 17016 17046 17206 17543 17800 17862 17898 17923
            """,
        ),
        Profile(
            "tau-airline",
            "a multi-turn tool-using agent, gpt-4o on airline tasks",
            "sierra-research/tau-bench at 59a200c6",
            "MIT",
            """
            1450 1567 1617 1648 1721 1763 1783 1808 1840 1850 1861 1873 1906 1970 2017 2058 2074
            2103 2158 2230 2275 2299 2426 2474 2509 2559 2645 2847 2901 2948 3050 3196 3247 3298
            3341 3380 3437 3455 3509 3599 3643 3753 3829 3895 4147 4163 4236 4332 4435 4565 4645
            4776 4920 5037 5084 5309 5403 5511 5706 6003 6349 6465 6907 7376 7502 7601 7748 7923
            7993 8127 8273 8987 9344 9558 9701
            """,
        ),
    )
}


def sample_lengths(profile: str, n: int, rng: np.random.Generator, scale: float = 1.0) -> IntArray:
    """Draw the tokens of n samples, int64[n], each times `scale` and at least 1.

    Raises ConfigError that lists the profiles if there is none of this name.
    """
    if profile not in PROFILES:
        raise ConfigError(f"no length profile {profile!r}; there are {', '.join(PROFILES)}")
    lengths = np.interp(rng.random(n), PROBABILITIES, PROFILES[profile].quantiles)
    return np.maximum(np.rint(lengths * scale), 1).astype(np.int64)
