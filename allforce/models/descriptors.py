"""The descriptors by their names in the input, without `hybrid`, which is made of these."""

from __future__ import annotations

from allforce.models.descriptor import Descriptor
from allforce.models.se_atten import SeAtten, SeAttenV2
from allforce.models.se_e2_a import SeE2A
from allforce.models.se_e2_r import SeE2R
from allforce.models.se_e3 import SeE3

PLAIN: dict[str, type[Descriptor]] = {
    "se_e2_a": SeE2A,
    "se_e2_r": SeE2R,
    "se_e3": SeE3,
    "se_atten": SeAtten,
    "se_atten_v2": SeAttenV2,
}
