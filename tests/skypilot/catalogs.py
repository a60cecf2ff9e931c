"""Mini catalogs of four clouds, in the columns of SkyPilot's: enough to place the shipped YAMLs without a network.

Prices are of the right order and made so that the cheapest is known; they are nobody's list prices.
"""

from __future__ import annotations

import csv
from pathlib import Path

_COLUMNS = (
    *("InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "Price", "SpotPrice"),
    *("Region", "AvailabilityZone", "GpuInfo", "Arch"),
)
_Row = tuple[str, str, float | str, float, float, float, float | str, str, str]

_AWS: list[_Row] = [
    ("p5.48xlarge", "H100", 8, 192, 2048, 55.0, 20.0, "us-east-1", "us-east-1a"),
    ("g6e.xlarge", "L40S", 1, 4, 32, 1.9, 0.9, "us-east-1", "us-east-1a"),
    ("g5.xlarge", "A10G", 1, 4, 16, 1.0, 0.45, "us-east-1", "us-east-1a"),
    ("m6i.4xlarge", "", "", 16, 64, 0.77, 0.3, "us-east-1", "us-east-1a"),
]
_GCP: list[_Row] = [
    ("a3-highgpu-8g", "H100", 8, 208, 1872, 80.0, 30.0, "us-central1", "us-central1-a"),
    ("a2-ultragpu-1g", "A100-80GB", 1, 12, 170, 5.0, 2.5, "us-central1", "us-central1-a"),
    ("g2-standard-4", "L4", 1, 4, 16, 0.7, 0.25, "us-central1", "us-central1-a"),
    ("n2-standard-16", "", "", 16, 64, 0.78, 0.2, "us-central1", "us-central1-a"),
]
_NEBIUS: list[_Row] = [
    ("gpu-h100-sxm_8gpu-128vcpu-1600gb", "H100", 8, 128, 1600, 24.0, 10.0, "eu-north1", ""),
    ("gpu-h100-sxm_1gpu-16vcpu-200gb", "H100", 1, 16, 200, 3.0, 1.2, "eu-north1", ""),
    ("cpu-d3_16vcpu-64gb", "", "", 16, 64, 0.4, "", "eu-north1", ""),
]
_RUNPOD: list[_Row] = [
    ("8x_H100_SECURE", "H100", 8, 128, 1000, 16.0, 8.0, "US", "US-CA-1"),
    ("1x_L40S_SECURE", "L40S", 1, 16, 60, 0.8, 0.3, "US", "US-CA-1"),
]
CLOUDS = {"aws": _AWS, "gcp": _GCP, "nebius": _NEBIUS, "runpod": _RUNPOD}
_OTHERS = {
    "aws/images.csv": "Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId",
    "aws/instance_quota_mapping.csv": "InstanceType,SpotInstanceCode,OnDemandInstanceCode",
    "gcp/images.csv": "Tag,Region,OS,OSVersion,ImageId,CreationDate,BaseImageId",
    "gcp/accelerator_quota_mapping.csv": "Accelerator,SpotInstanceCode,OnDemandInstanceCode",
    "common/metadata.csv": "GPU,MemoryGB",
    "common/accelerators.csv": "AcceleratorName,Clouds\nH100,AWS\nL40S,AWS\nA10G,AWS\nL4,GCP\nA100-80GB,GCP",
}


def write_catalogs(root: Path) -> None:
    """Below `root`, the versioned catalog folder. Files without a checksum next to them are taken as edited by a user
    and never refreshed; they are new enough not to be asked about anyway."""
    for cloud, rows in CLOUDS.items():
        path = root / cloud / "vms.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(_COLUMNS)
            for name, gpu, count, cpus, memory, price, spot, region, zone in rows:
                info = f"{{'Gpus': [{{'Name': '{gpu}', 'MemoryInfo': {{'SizeInMiB': 81920}}}}]}}" if gpu else ""
                writer.writerow((name, gpu, count, cpus, memory, price, spot, region, zone, info, "x86_64"))
    for name, header in _OTHERS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(header + "\n")
