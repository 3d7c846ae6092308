"""Messages of the library in the words of the command line: arguments become options, functions become commands."""

import re
from collections.abc import Mapping

_EXTRACT = re.compile(r"dubito\.extract\(model, (?:images|'([^']*)'), to='([^']*)'\)")
_LABEL = re.compile(r"dubito\.cache\.label_cache\((?:'([^']*)'|folder), labels\)")
_PROBE = re.compile(r"dubito\.extract\(\.\.\., probes=\[dubito\.probes\.(\w+)\(\)\]\)")
_LATER = re.compile(r"(?<=[ (])guard\.(refit|with_risk)\b(?:\([^()]*\))?")
_PREPROCESS = re.compile(r"transform=dubito\.Preprocess\(\.\.\., ((?:\w+=(?:\d+|\([^()]*\))(?:, )?)+)\)")
_COLUMN = re.compile(r"table\.extended\((\w+)=\[\.\.\.\]\), one name or whole number per row")
_MISSED = re.compile(r"missed=\{[\"']?([^\"':{}]+)[\"']?: ([^{}]+)\}")
_PHRASES = {
    "with SafeIndex.save.": "with `dubito search build`.",
    "with Guard.save.": "with `dubito guard fit`.",
    "Save one with save_calibration.": "Save one with `dubito calibrate CACHE --to DIR`.",
    "join the tables of several models with dubito.ensemble": "pass the caches of several models",
    "(dubito.extract(..., probes=": "(in Python: dubito.extract(..., probes=",  # which no option can stand for
}
"""What to do: in Python, and on the command line."""
_COMMANDS = {
    "Guard.fit": "guard fit",
    "guard.decide": "guard run",
    "guard.refit": "guard refit",
    "guard.with_risk": "guard with-risk",
    "guard.export_onnx": "guard export",
    "watch.label": "watch",
    "SafeIndex.build": "search build",
    "SafeIndex.search": "search query",
    "draw_map": "map",
    "model_report": "report",
    "least_trusted": "report",
    "rejection_study": "reject",
    "diagnose_ensemble": "ensemble",
    "find_label_issues": "label-issues",
    "label_cache": "label",
    "head.fit": "train",
}
"""What errors begin with: the function that was called, and the command that calls it."""
_CALLER = re.compile(rf"^(?:({'|'.join(map(re.escape, _COMMANDS))})|(\w+)\.(?:fit|score))(?=[ :])")
_CODE = r"`[^`]*`|\bdubito\.[\w.]+\((?:[^()]|\([^()]*\))*\)|(?<!\w)'[^']*'"
"""Parts of a message that are left as they are: commands, calls in Python and quoted values."""


def translate(text: str, options: Mapping[str, str]) -> str:
    """A message of the library in the words of the command line: arguments become options.

    >>> translate("compare: ood 'cats' is empty. Pass ood= or train='x'.", {"ood": "--ood", "train": "--learn-from"})
    "--ood 'cats' is empty. Pass --ood or --learn-from 'x'."
    """
    text = _EXTRACT.sub(lambda match: f"`dubito extract MODEL {match[1] or 'IMAGES'} --to {match[2]}`", text)
    text = _LATER.sub(lambda match: f"`dubito guard {match[1].replace('_', '-')}`", text)
    text = _PROBE.sub(lambda match: f"`dubito extract ... --probe {_snake(match[1])}`", text)
    for python, command_line in _PHRASES.items():
        text = text.replace(python, command_line)
    text = _LABEL.sub(lambda match: f"`dubito label {match[1] or 'CACHE'} LABELS`", text)
    if not options:
        return text
    if "groups" in options:
        text = _COLUMN.sub(lambda match: f"{options['groups']} FILE.csv with the columns path and {match[1]}", text)
    if "missed" in options:
        text = _MISSED.sub(rf"{options['missed']} \1=\2", text)
    text = _PREPROCESS.sub(lambda match: _flags(match[1]) if "transform" in options else match[0], text)
    names = "|".join(map(re.escape, options))
    keyword = rf"(?<![\w.-])(?P<keyword>{names})=(?P<value>True|\.\.\.|\S?)"
    argument = rf"(?:^|(?<=: )|(?<= in ))(?P<argument>{names})(?=: | must | needs | cannot | is | \(| ')"

    def replaced(match: re.Match[str]) -> str:
        if match["argument"]:
            return options[match["argument"]]
        if not match["keyword"]:
            return match[0]
        value = match["value"].removeprefix("True")
        return options[match["keyword"]] + (value if value in ("", ".", ",", ";", ")") else f" {value}")

    # The function that was called means nothing to people who typed an option or a command.
    text = re.sub(r"^[\w.]+: (?=--|[A-Z]+ must )", "", re.sub(f"{_CODE}|{keyword}|{argument}", replaced, text))
    return _CALLER.sub(lambda match: f"dubito {_COMMANDS[match[1]]}" if match[1] else match[2], text)


def _flags(settings: str) -> str:
    """Settings of a transform as options.

    >>> _flags("size=(32, 48), resize=32, mean=(0.5, 0.4, 0.3)")
    '--input-size 32x48 --resize 32 --mean 0.5,0.4,0.3'
    """
    pairs = re.findall(r"(\w+)=\(?([^()=]+?)\)?(?:, (?=\w+=)|$)", settings)
    sizes = [("input-size", text.replace(", ", "x")) if name == "size" else (name, text) for name, text in pairs]
    return " ".join(f"--{name} {text.replace(', ', ',')}" for name, text in sizes)


def _snake(name: str) -> str:
    """The name of a probe, from that of its class.

    >>> _snake("PreActivation")
    'pre_activation'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
