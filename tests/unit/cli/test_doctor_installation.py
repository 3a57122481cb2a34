"""One whole copy, taken from where pip put it."""

import json

from qpatch.doctor import installation, interpreter


def test_one_copy_is_fine_and_two_are_named_with_their_versions(machine):
    assert installation.copies(machine.context()).verdict == "ok"
    other = machine.write("user/qpatch/__init__.py", '__version__ = "0.0.9"\n').parent
    verdict = installation.copies(machine.context(path=(machine.site, other.parent)))
    assert verdict.verdict == "warn"
    assert f"{other} (0.0.9)" in verdict.found and f"in use: {machine.site / 'qpatch'}" in verdict.found


def test_a_copy_that_hides_the_installed_one_is_a_problem(machine):
    machine.distribution("qpatch", "0.1.0", files=["qpatch/__init__.py"])
    assert installation.origin(machine.context()).verdict == "ok"
    shadow = machine.write("source/qpatch/__init__.py", '__version__ = "0.1.0"\n').parent
    verdict = installation.origin(machine.context(package=shadow, path=(shadow.parent, machine.site)))
    assert verdict.verdict == "problem"
    assert str(shadow) in verdict.found and str(machine.site / "qpatch") in verdict.found


def test_an_editable_install_is_expected_in_its_source_folder(machine):
    source = machine.write("my project/qpatch/__init__.py", '__version__ = "0.1.0"\n').parent
    info = machine.distribution("qpatch", "0.1.0")
    (info / "direct_url.json").write_text(json.dumps({"url": source.parent.as_uri(), "dir_info": {"editable": True}}))
    assert installation.origin(machine.context(package=source)).verdict == "ok"
    assert installation.origin(machine.context()).verdict == "problem"


def test_an_update_that_stopped_halfway_is_seen(machine):
    machine.distribution("qpatch", "0.2.0")
    verdict = installation.origin(machine.context())
    assert verdict.verdict == "problem" and "0.1.0" in verdict.found and "0.2.0" in verdict.found


def test_installed_files_that_are_gone_are_counted_but_not_the_start_up_files(machine):
    machine.distribution("qpatch", "0.1.0", files=["qpatch/__init__.py", "qpatch/engine.py", "qpatch.pth"])
    verdict = installation.origin(machine.context())
    assert verdict.verdict == "problem" and "1 of the installed files" in verdict.found
    (machine.site / "qpatch" / "engine.py").write_text("")
    (machine.site / "qpatch.pth").unlink()
    assert installation.origin(machine.context()).verdict == "ok"


def test_a_copy_without_metadata_is_noted(machine):
    assert installation.origin(machine.context()).verdict == "note"


def test_an_orphaned_start_up_file_and_an_empty_folder_are_found(machine):
    assert installation.leftovers(machine.context()).verdict == "ok"
    machine.write("old/qpatch.pth", "import qpatch; qpatch.activate()\n")
    (machine.folder / "empty" / "qpatch").mkdir(parents=True)
    folders = (machine.site, machine.folder / "old", machine.folder / "empty")
    verdict = installation.leftovers(machine.context(site_folders=folders))
    assert verdict.verdict == "problem"
    assert str(folders[1] / "qpatch.pth") in verdict.found and str(folders[2] / "qpatch") in verdict.found
    assert str(machine.site) not in verdict.found


def test_a_start_up_file_whose_path_line_leads_to_the_package_is_no_orphan(machine):
    package = machine.write("target/qpatch/__init__.py").parent
    old = machine.write("old/qpatch.pth", f"{package.parent}\nimport qpatch; qpatch.activate()\n").parent
    machine.write("old/qpatch.start", "qpatch:activate\n")
    assert installation.leftovers(machine.context(site_folders=(old,))).verdict == "ok"


def test_the_start_up_file_of_an_editable_install_is_no_orphan(machine):
    old = machine.write("old/qpatch.pth", "import qpatch; qpatch.activate()\n").parent
    machine.write("old/__editable__.qpatch-0.1.0.pth", "import __editable___qpatch_0_1_0_finder\n")
    assert installation.leftovers(machine.context(site_folders=(old,))).verdict == "ok"


def test_an_install_for_the_user_is_not_seen_with_minus_s(machine):
    assert installation.user_site(machine.context(user_site=machine.folder / "user")).verdict == "ok"
    verdict = installation.user_site(machine.context(user_site=machine.site))
    assert verdict.verdict == "warn" and f"{machine.executable} -s -m pip install" in verdict.todo


def test_the_interpreter_comes_with_path_kind_and_switches(machine):
    assert str(machine.executable) in interpreter.interpreter(machine.context()).found
    machine.write("python/python312._pth", "import site\n")
    assert "embedded" in interpreter.interpreter(machine.context()).found
    assert interpreter.interpreter(machine.context(python=(3, 9))).verdict == "warn"


def test_switches_that_are_set_are_listed_and_unknown_ones_complained_of(machine, monkeypatch, no_switches):
    assert interpreter.switches(machine.context()).verdict == "ok"
    monkeypatch.setenv("QPATCH_LOG", "debug")
    verdict = interpreter.switches(machine.context(environ={"QPATCH_LOG": "debug", "QPATCH_TEST_COMFYUI": "x"}))
    assert verdict.verdict == "note" and verdict.found.endswith("QPATCH_LOG=debug")
    monkeypatch.setenv("QPATCH_DISABLE", "lazy-liner")
    verdict = interpreter.switches(machine.context(environ={"QPATCH_DISABLE": "lazy-liner"}))
    assert verdict.verdict == "warn" and "lazy-linear" in verdict.found


def test_reinstalling_is_told_by_the_source_and_never_by_the_name(machine):
    context = machine.context()
    assert installation.reinstall(context).endswith(' -m pip install --force-reinstall --no-deps "PATH_TO_QPATCH"')
    info = machine.distribution("qpatch", "0.1.0")
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///opt/my%20files/qpatch-0.1.0-py3-none-any.whl"}))
    assert installation.reinstall(context).endswith('"/opt/my files/qpatch-0.1.0-py3-none-any.whl"')
    (info / "direct_url.json").write_text(json.dumps({"url": "file:///src", "dir_info": {"editable": True}}))
    assert installation.reinstall(context).endswith(' -e "/src"')
    (info / "direct_url.json").write_text("not JSON")
    assert installation.reinstall(context).endswith('"PATH_TO_QPATCH"')
