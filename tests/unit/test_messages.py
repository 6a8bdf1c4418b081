"""The index of messages in the docs."""

from scripts.docs import messages


def written(tmp_path, source):
    file = tmp_path / "a.py"
    file.write_text(source)
    return [(found.severity, found.text, found.status) for found in messages.find_messages(file)]


def test_a_text_keeps_its_words_and_has_placeholders_for_the_rest(tmp_path):
    source = """
HOME = "~/.cache"

def check(folder, names):
    line = f"{folder / 'x'}: has {len(names)} of {', '.join(names)}. Empty {HOME}."
    raise BadInput(line) from None
"""
    assert written(tmp_path, source) == [("error", "N: has N of .... Empty ~/.cache.", "2")]


def test_severity_and_status_are_those_of_what_prints(tmp_path):
    source = """
print_message("warning", f"no replacement for {rank}")
remarks.append(f"note: {host}: running on CPU")
raise EndOfRun("replicas differ", status=REPLICAS_DIFFER)
raise EndOfRun(f"saved at step {step}", status=0)
raise ValueError("ours alone")
"""
    assert written(tmp_path, source) == [
        ("warning", "no replacement for RANK", ""),
        ("note", "HOST: running on CPU", ""),
        ("error", "replicas differ", "4"),
        ("note", "saved at step STEP", "0"),
    ]
