"""When a target comes: before activation, in the middle of another import, out of a hook."""

TARGET = "def f(x):\n    return x\n"


def test_a_target_imported_before_activation_is_mended_at_activation(each_python, bench):
    bench.write(**{"pkg.target": TARGET})
    bench.watch("pkg.target")
    bench.run(each_python, """
        import sys, qpatch
        ours = [finder for finder in sys.meta_path if type(finder).__module__ == "qpatch.finder"]
        sys.meta_path.remove(*ours)
        import pkg.target
        assert pkg.target.f(1) == 1
        assert probe.states() == {"pkg.target": "incompatible"}
        qpatch.activate()
        assert pkg.target.f(1) == 2
        assert probe.states() == {"pkg.target": "applied"}
        qpatch.activate()
        assert pkg.target.f(1) == 2
    """)


def test_a_target_that_is_half_imported_at_activation_is_left_until_it_is_whole(each_python, bench):
    bench.write(**{"pkg.target": """
        import qpatch
        qpatch.activate()
        def f(x):
            return x
    """})
    bench.watch("pkg.target")
    bench.run(each_python, """
        import sys, qpatch
        sys.meta_path.remove(next(f for f in sys.meta_path if type(f).__module__ == "qpatch.finder"))
        import pkg.target
        assert pkg.target.f(1) == 1
        assert probe.states() == {"pkg.target": "incompatible"}
        qpatch.activate()
        assert pkg.target.f(1) == 2
    """)


def test_a_circular_import_meets_the_body_unfinished_and_the_end_mended(each_python, bench):
    bench.write(**{
        "pkg.target": "def f(x):\n    return x\nimport pkg.friend\n",
        "pkg.friend": "import pkg.target as target\nearly = target.f(1)\ndef late():\n    return target.f(1)\n",
    })
    bench.watch("pkg.target")
    bench.run(each_python, "import pkg.target, pkg.friend; assert (pkg.friend.early, pkg.friend.late()) == (1, 2)")


def test_the_hook_is_given_the_module_before_its_parent_knows_it(each_python, bench):
    bench.write(parent_probe="""
        import sys
        from probe import patches, finding
        def examine(module):
            assert not hasattr(sys.modules["pkg"], "target")
            return finding.needed("")
    """, **{"pkg.target": TARGET})
    bench.watch("pkg.target", implementation="parent_probe")
    bench.run(each_python, """
        import pkg.target
        assert pkg.target.f(1) == 2
    """, env={"QPATCH_STRICT": "1"})


def test_a_target_that_imports_another_target_has_both_mended(each_python, bench):
    bench.write(**{"pkg.target": "from pkg import second\nfrom pkg.second import f as inner\n"
                                 "def f(x):\n    return inner(x)\n",
                   "pkg.second": "def f(x):\n    return x\n"})
    bench.watch("pkg.target", "pkg.second")
    bench.run(each_python, """
        import pkg.target
        assert pkg.target.f(1) == 3
        assert probe.states() == {"pkg.target": "applied", "pkg.second": "applied"}
    """)


def test_a_hook_may_import_another_target(each_python, bench):
    bench.write(importing_probe="""
        from probe import finding, patches
        def examine(module):
            import pkg.second
            assert pkg.second.f(1) == 2
            return finding.needed("")
    """, **{"pkg.target": TARGET, "pkg.second": TARGET})
    bench.watch("pkg.target", implementation="importing_probe")
    bench.watch("pkg.second", name="second")
    bench.run(each_python, """
        import pkg.target
        assert pkg.target.f(1) == pkg.second.f(1) == 2
    """, env={"QPATCH_STRICT": "1"})


def test_other_modules_of_the_same_last_name_are_left_alone(each_python, bench):
    bench.write(**{"pkg.target": TARGET, "other.target": TARGET, "target": TARGET, "deep.pkg.target": TARGET})
    bench.watch("pkg.target")
    bench.run(each_python, """
        import pkg.target, other.target, target, deep.pkg.target
        assert [m.f(1) for m in (pkg.target, other.target, target, deep.pkg.target)] == [2, 1, 1, 1]
        assert list(probe.states()) == ["pkg.target"]
    """)
