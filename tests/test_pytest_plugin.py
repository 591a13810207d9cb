"""The plugin for pytest, in runs of pytest of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import rdmacm

pytest_plugins = ["pytester"]

#: A test that fails where a packet of its data is lost, as the requester does not try again.
PING = """
import pytest
from rdmacm import CmEventType, CmId, ConnParam, EventChannel

@pytest.mark.rdmacm(loss=0.1, seeds=8)
def test_ping(fabric, rdma_hosts):
    a, b = rdma_hosts
    kept = []

    def serve(event):
        if event.type is CmEventType.CONNECT_REQUEST:
            event.id.create_qp()
            event.id.post_recv(0, event.id.reg_msgs(bytearray(64)))
            event.id.accept()
            kept.append(event.id)

    with EventChannel(b.provider) as channel, CmId(channel) as listener, CmId(provider=a.provider) as client:
        b.on_event(channel, serve)
        listener.bind_addr(("10.0.0.2", 7471))
        listener.listen()
        client.resolve_addr(("10.0.0.2", 7471))
        client.resolve_route()
        client.create_qp()
        client.connect(ConnParam(retry_count=0))
        client.post_send(0, client.reg_msgs(bytearray(b"hello")))
        assert client.get_send_comp().status == 0
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(rdmacm.__file__).parents[1]))
    for name in ("CI", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def result_of(pytester: pytest.Pytester, text: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(text)
    installed = [*entry_points(group="pytest11", name="rdmacm")]
    plugin = [] if installed else ["-p", "rdmacm.pytest_plugin"]
    return pytester.runpytest_subprocess(*plugin, "-p", "no:cacheprovider", *options)


def test_the_package_does_not_import_pytest() -> None:
    code = "import sys, rdmacm, rdmacm.testing, rdmacm.lab; print('pytest' in sys.modules)"
    environ = {"PYTHONPATH": str(Path(rdmacm.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_plugin_imports_the_package_in_tests_that_use_it() -> None:
    code = "import sys, rdmacm.pytest_plugin; print('rdmacm.testing' in sys.modules, 'rdmacm.lab' in sys.modules)"
    environ = {"PYTHONPATH": str(Path(rdmacm.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


class TestSeeds:
    TEXT = """
        import pytest

        @pytest.mark.rdmacm(seeds=3, seed=5)
        class TestMarked:
            def test_many(self, fabric):
                print("seed", fabric.seed)

            @pytest.mark.rdmacm(seeds=1, loss=0.25)
            def test_nearest_mark(self, fabric):
                assert fabric.loss == 0.25

        def test_plain(fabric, rdma_hosts):
            assert fabric.seed < 10
            assert [host.name for host in rdma_hosts] == ["a", "b"]

        def test_without():
            pass
    """

    def test_a_mark_gives_their_number(self, run: pytest.Pytester) -> None:
        result = result_of(run, self.TEXT, "-v", "--strict-markers")
        result.assert_outcomes(passed=6)
        result.stdout.fnmatch_lines(["*test_many?seed5? PASSED*", "*test_many?seed7? PASSED*", "*test_plain PASSED*"])

    def test_an_option_gives_it_to_all(self, run: pytest.Pytester) -> None:
        result = result_of(run, self.TEXT, "-k", "many or without", "--rdmacm-seeds", "10")
        result.assert_outcomes(passed=11, deselected=20)

    def test_an_option_gives_the_only_one(self, run: pytest.Pytester) -> None:
        result = result_of(run, self.TEXT, "-s", "-k", "many", "--rdmacm-seed", "77")
        result.stdout.fnmatch_lines(["*seed 77*"])
        result.assert_outcomes(passed=1, deselected=3)

    def test_processes_of_xdist_share_them(self, run: pytest.Pytester) -> None:
        pytest.importorskip("xdist")
        result_of(run, self.TEXT, "-n", "2", "--rdmacm-seeds", "10").assert_outcomes(passed=31)

    def test_an_unknown_argument_of_the_mark_is_an_error(self, run: pytest.Pytester) -> None:
        text = "import pytest\n@pytest.mark.rdmacm(los=0.1)\ndef test(fabric): pass"
        result_of(run, text).stdout.fnmatch_lines(["*the mark rdmacm of *::test takes no los*"])


class TestFailures:
    def test_the_report_has_seed_packets_and_the_shortest_faults(self, run: pytest.Pytester) -> None:
        captures = run.path / "captures"
        result = result_of(run, PING, "--rdmacm-seeds", "30", "--rdmacm-captures", str(captures))
        assert result.parseoutcomes().keys() == {"passed", "failed"}
        result.stdout.fnmatch_lines(
            [
                "*- rdmacm fabric -*",
                "seed 1, to repeat: pytest '*::test_ping?seed1?' --rdmacm-seed 1",
                "*|-- REQ #1 -*|",
                f"packets: {captures}/*test_ping-seed1.pcapng",
                "*- rdmacm faults -*",
                "the shortest script that fails has 1 of *",
                '@pytest.mark.rdmacm(seed=*, faults="""',
                "    lose RC_* 1 from * to *",
                '""")',
            ]
        )
        files = {path.name for path in captures.iterdir()}
        assert len(files) == result.parseoutcomes()["failed"]

    def test_the_printed_mark_repeats_the_failure(self, run: pytest.Pytester) -> None:
        mark = 'rdmacm(seed=2, faults="""\n    lose RC_SEND_ONLY 1 from a to b\n""")'
        result = result_of(run, PING.replace("rdmacm(loss=0.1, seeds=8)", mark))
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["the shortest script that fails has 1 of 1 faults (2 runs):"])

    def test_many_faults_shrink_to_those_that_matter(self, run: pytest.Pytester) -> None:
        faults = "".join(f"delay {kind} * by 0.000001\n" for kind in ("REQ", "REP", "RTU", "ACK", "RC_SEND_ONLY"))
        mark = f'rdmacm(seed=2, faults="""\nlose RC_ACKNOWLEDGE 1\n{faults}""")'
        result = result_of(run, PING.replace("rdmacm(loss=0.1, seeds=8)", mark))
        result.stdout.fnmatch_lines(
            ["the shortest script that fails has 1 of 5 faults *", "    lose RC_ACK* 1 from b*"]
        )

    def test_faults_of_hosts_shrink_too(self, run: pytest.Pytester) -> None:
        text = """
            import pytest

            @pytest.mark.rdmacm(faults='''
                at 1 slow b 0.001
                at 2 drift b 1.5
                at 3 partition a b
                at 4 heal
                at 5 pause a
                at 6 crash b
                at 7 jump a 1
            ''')
            def test(fabric, rdma_hosts):
                fabric.run(until=10)
                assert rdma_hosts[1].alive or not rdma_hosts[0].paused
        """
        result_of(run, text).stdout.fnmatch_lines(
            ["the shortest script that fails has 2 of 7 faults *", "    at 5 pause a", "    at 6 crash b"]
        )

    def test_programs_of_readme(self, run: pytest.Pytester) -> None:
        """The ACK of the client's last message is lost, and the server has gone before the next copy."""
        readme = (Path(__file__).parents[1] / "README.md").read_text()
        for name in ("server", "client"):
            (program,) = re.findall(rf"```python\n(# {name}\.py\n.*?)```", readme, re.DOTALL)
            (run.path / f"{name}.py").write_text(program)
        text = """
            import pytest

            @pytest.mark.rdmacm(seed=3, faults="repeat RC_RDMA_WRITE_ONLY 1\\nlose ACK 2- from a to client")
            def test(fabric, rdma_hosts):
                server = rdma_hosts[0].script("server.py")
                fabric.process("a", "client").script("client.py").result()
                server.result()
        """
        result = result_of(run, text, "--junitxml", "reports/junit.xml", "-W", "ignore")
        result.stdout.fnmatch_lines(
            [
                "*CmDisconnectedError: send 127.0.0.1:7471: the peer has disconnected*",
                "seed 3, to repeat: pytest *::test",
                "*RC_SEND_ONLY #*",
                "*|-- RC_ACKNOWLEDGE #* lost",
                "*DREQ #*",
                f"packets: {run.path}/reports/*.pcapng",
                "the shortest script that fails has 1 of *",
                "    lose RC_ACKNOWLEDGE 2 from a to client",
            ]
        )

    def test_shrinking_can_be_left_out(self, run: pytest.Pytester) -> None:
        result = result_of(run, PING, "--rdmacm-seeds", "3", "--rdmacm-shrink", "0")
        result.stdout.fnmatch_lines(["*- rdmacm fabric -*"])
        result.stdout.no_fnmatch_line("*rdmacm faults*")

    def test_a_failure_without_faults_is_not_run_again(self, run: pytest.Pytester) -> None:
        result = result_of(run, "def test(fabric):\n    print('run')\n    assert False", "-s")
        result.assert_outcomes(failed=1)
        assert result.stdout.str().count("run\n") == 1
        result.stdout.fnmatch_lines(["no packet was sent"])

    def test_a_failure_that_does_not_need_the_faults_says_so(self, run: pytest.Pytester) -> None:
        text = PING.replace("status == 0", "status == 99").replace("loss=0.1, seeds=8", "duplicate=1.0")
        result_of(run, text).stdout.fnmatch_lines(["it fails without any of its * faults, too (2 runs)"])

    def test_fixtures_are_made_anew_for_each_run(self, run: pytest.Pytester) -> None:
        fixture = """
@pytest.fixture(autouse=True)
def order(fabric):
    print("begin", fabric.now)
    yield
    print("end")
"""
        result = result_of(run, PING + fixture, "-s", "--rdmacm-seed", "2")
        words = [line.split()[-1] for line in result.outlines if line.endswith(("begin 0.0", "end"))]
        assert words == ["0.0", "end"] * 3

    def test_reports_have_the_seed_and_lie_beside_the_packets(self, run: pytest.Pytester) -> None:
        result_of(run, PING, "--rdmacm-seed", "2", "--junitxml", "reports/junit.xml")
        assert '<property name="rdmacm_seed" value="2" />' in (run.path / "reports" / "junit.xml").read_text()
        assert len([*(run.path / "reports").glob("*.pcapng")]) == 1


class TestCoroutines:
    def test_a_coroutine_runs_in_virtual_time(self, run: pytest.Pytester) -> None:
        text = """
            import asyncio

            async def test(fabric):
                await asyncio.sleep(1000)
                assert fabric.now >= 1000
        """
        result_of(run, text).assert_outcomes(passed=1)

    #: A server is a fixture that comes before the fabric, and its client a test.
    PAIR = """
        import asyncio, pytest{imports}
        from rdmacm import aio

        {fixture}
        async def server(rdma_hosts):
            async def reverse(connection):
                async for message in connection:
                    await connection.send(message[::-1])

            async with await aio.start_server(reverse, "10.0.0.2", 7471, provider=rdma_hosts[1].provider):
                await asyncio.sleep(1000)
                yield

        @pytest.mark.rdmacm(seeds=2, loss=0.1)
        {mark}
        async def test_virtual(server, fabric, rdma_hosts):
            await asyncio.sleep(1000)
            async with await aio.connect(("10.0.0.2", 7471), timeout=60, provider=rdma_hosts[0].provider) as connection:
                await connection.send(b"live")
                assert await connection.recv() == b"evil"
            assert 2000 <= fabric.now < 2100

        {mark}
        async def test_real():
            await asyncio.sleep(0)
            assert type(asyncio.get_running_loop()).__module__ != "rdmacm.testing.loop"

        async def test_without_a_plugin(fabric):
            await asyncio.sleep(1000)
    """

    def test_anyio_has_the_loop_of_the_fabric(self, run: pytest.Pytester) -> None:
        pytest.importorskip("anyio")
        backend = '\n\n        @pytest.fixture\n        def anyio_backend():\n            return "asyncio"\n'
        text = self.PAIR.format(imports=backend, fixture="@pytest.fixture", mark="@pytest.mark.anyio")
        result_of(run, text).assert_outcomes(passed=4)

    @pytest.mark.parametrize("mode", ["strict", "auto"])
    def test_pytest_asyncio_has_the_loop_of_the_fabric(self, run: pytest.Pytester, mode: str) -> None:
        pytest.importorskip("pytest_asyncio")
        fixture, mark = "@pytest_asyncio.fixture", "@pytest.mark.asyncio"
        text = self.PAIR.format(imports=", pytest_asyncio", fixture=fixture, mark=mark)
        scope = "asyncio_default_fixture_loop_scope=function"
        result_of(run, text, f"--asyncio-mode={mode}", "-W", "error", "-o", scope).assert_outcomes(passed=4)

    def test_both_without_marks_and_in_processes_of_xdist(self, run: pytest.Pytester) -> None:
        for name in ("pytest_asyncio", "anyio", "xdist"):
            pytest.importorskip(name)
        text = self.PAIR.format(imports="", fixture="@pytest.fixture", mark="")
        outcome = result_of(run, text, "--asyncio-mode=auto", "-n", "2", "--rdmacm-seeds", "5")
        outcome.assert_outcomes(passed=11)


class TestPrograms:
    def test_two_namespaces(self, run: pytest.Pytester) -> None:
        text = """
            import pytest

            @pytest.mark.rdmacm(mtu=4200)
            def test(rdmacm_namespace):
                h1, h2 = rdmacm_namespace
                assert h1.run(["uname", "-n"]).stdout == "h1\\n"
                assert h2.run(["cat", "/sys/class/net/eth0/mtu"]).stdout == "4200\\n"
        """
        outcome = result_of(run, text, "-rs")
        assert outcome.parseoutcomes() in ({"passed": 1}, {"skipped": 1})
        if outcome.parseoutcomes() == {"skipped": 1}:
            outcome.stdout.fnmatch_lines(["SKIPPED*namespaces are refused here: *"])

    def test_programs_are_ended_with_the_test(self, run: pytest.Pytester) -> None:
        text = """
            import os

            started = []

            def test_start(rdmacm_run):
                started.append(rdmacm_run("sh", "-c", "echo begun; exec sleep 1000"))
                line = started[0].stdout.readline()
                while "begun" not in line:
                    assert line, started[0].wait()
                    line = started[0].stdout.readline()

            def test_gone():
                assert started[0].returncode is not None
        """
        result = result_of(run, text)
        if "install a C compiler" in result.stdout.str():
            pytest.skip("needs the library for programs")
        result.assert_outcomes(passed=2)
