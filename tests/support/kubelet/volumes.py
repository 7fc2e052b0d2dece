"""A pod's volumes as directories of this machine; those of Secrets and ConfigMaps follow them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.support.kubelet.api import KubeApi, Object
from tests.support.kubelet.manifests import NotYet, data_of, field_of, quantity
from tests.support.kubelet.sandbox import Mount, unmount


class Volumes:
    """Owns the directories of one pod; claims lie in `claims` and outlive it."""

    def __init__(self, api: KubeApi, pod: Object, folder: Path, claims: Path) -> None:
        self._api = api
        self._pod = pod
        self._folder = folder
        self._claims = claims
        self._sources: dict[str, Path] = {}
        self._memory: list[Path] = []

    def make(self) -> None:
        """Make those that are not there yet.

        Raises:
            NotYet: a Secret or ConfigMap is not there.
        """
        for volume in self._pod["spec"].get("volumes", []):
            if volume["name"] not in self._sources:
                self._sources[volume["name"]] = self._made(volume)
        self.refresh()

    def refresh(self) -> None:
        """Write anew what Secrets and ConfigMaps say now."""
        for volume in self._pod["spec"].get("volumes", []):
            if (files := self._files(volume)) is not None:
                kinds = (volume.get(kind, {}) for kind in ("secret", "configMap", "projected"))
                [mode, *_] = [k["defaultMode"] for k in kinds if "defaultMode" in k] or [0o644]
                _write(self._sources[volume["name"]], files, mode, self._group)

    def mounts(self, container: Object) -> list[Mount]:
        """Return what the container sees of them."""
        found = []
        for mount in container.get("volumeMounts", []):
            source = self._sources[mount["name"]]
            if part := mount.get("subPath"):
                source = source / part
            found.append(Mount(source, mount["mountPath"], mount.get("readOnly", False)))
        return found

    def close(self) -> None:
        for folder in self._memory:
            unmount(folder)

    @property
    def _group(self) -> int | None:
        group: int | None = self._pod["spec"].get("securityContext", {}).get("fsGroup")
        return group

    def _made(self, volume: Object) -> Path:
        folder = self._folder / volume["name"]
        if "hostPath" in volume:
            there = Path(volume["hostPath"]["path"])
            if volume["hostPath"].get("type") == "DirectoryOrCreate":
                there.mkdir(mode=0o755, parents=True, exist_ok=True)
            return there
        if "persistentVolumeClaim" in volume:
            folder = self._claims / volume["persistentVolumeClaim"]["claimName"]
        elif "emptyDir" not in volume and self._files(volume) is None:
            raise NotImplementedError(f"a volume that is {sorted(volume)}")
        folder.mkdir(parents=True, exist_ok=True)
        empty = volume.get("emptyDir", {})
        if empty.get("medium", "") != "":
            size = int(quantity(empty.get("sizeLimit", "64Mi")))
            command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "volume", folder]
            subprocess.run(command, check=True)
            self._memory.append(folder)
        if self._group is not None:
            os.chown(folder, -1, self._group)
            folder.chmod(0o2775)
        elif "emptyDir" in volume:
            folder.chmod(0o1777)
        return folder

    def _files(self, volume: Object) -> Mapping[str, bytes] | None:
        """Return the files of a Secret, a ConfigMap or what projects several, else None."""
        found: dict[str, bytes] = {}
        sources = volume.get("projected", {}).get("sources") or [volume]
        for source in sources:
            if "secret" in source:
                ref, kind = source["secret"], "secrets"
                name = ref.get("secretName", ref.get("name"))
            elif "configMap" in source:
                ref, kind = source["configMap"], "configmaps"
                name = ref["name"]
            elif "downwardAPI" in source:
                for item in source["downwardAPI"]["items"]:
                    path = item["fieldRef"]["fieldPath"]
                    found[item["path"]] = field_of(self._pod, path).encode()
                continue
            else:
                return None
            optional = ref.get("optional", False)
            data = data_of(self._api, kind, name, optional=optional)
            for item in ref.get("items") or [{"key": key, "path": key} for key in data]:
                if item["key"] in data:
                    found[item["path"]] = data[item["key"]]
                elif not optional:
                    raise NotYet(f"{kind} {name} has no {item['key']}")
        return found


def _write(folder: Path, files: Mapping[str, bytes], mode: int, group: int | None) -> None:
    """Write root's files; with a `group` they are its, too, which may then read them."""
    for name, content in files.items():
        file = folder / name
        if not file.exists() or file.read_bytes() != content:
            file.parent.mkdir(parents=True, exist_ok=True)
            draft = file.with_name(f".{file.name}.new")
            draft.write_bytes(content)
            if group is not None:
                os.chown(draft, -1, group)
            draft.chmod(mode if group is None else mode | 0o440)
            draft.replace(file)
