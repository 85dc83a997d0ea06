// Values of NumPy and torchvision are in the file that EXPECTED names; see test_phone.py.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';
import { suppress } from '../../mmcare/phone/page/decode.js';
import { nodesOnCpu, ordered } from '../../mmcare/phone/page/engines.js';
import { deviation, measureInTurn, summarize } from '../../mmcare/phone/page/measure.js';

const expected = JSON.parse(readFileSync(process.env.EXPECTED));
const close = (a, b) => assert.ok(Math.abs(a - b) <= 1e-12 * Math.abs(b), `${a} is not ${b}`);

test('statistics', () => {
  const { q1, ms, q3 } = summarize(expected.values[0], expected.values[1]);
  [q1, ms, q3].forEach((value, index) => close(value, expected.quantiles[index]));
  close(deviation([...expected.values].reverse(), expected.values), expected.deviation);
  assert.ok(Number.isNaN(deviation([[1, NaN]], [[1, 2]])));
  assert.ok(!(deviation([[1]], [[1, 2]]) < 1) && !(deviation([[1, 2, 3]], [[1, 2]]) < 1));
});

test('overlapping boxes', () => {
  const boxes = expected.boxes.map(([box, score, label]) => ({ box, score, label }));
  assert.deepEqual(suppress(boxes, 0.4, 1000).map(({ box }) => box), expected.kept);
  assert.equal(suppress(boxes, 0.4, 3).length, 3);
});

test('turns', async () => {
  const order = [];
  const runs = ['a', 'b'].map((name) => async () => {
    order.push(name);
    await new Promise((resolve) => setTimeout(resolve, 25));
  });
  const times = await measureInTurn(runs, 2, () => true);
  assert.equal(order.join(''), 'ababababab');
  assert.deepEqual(times.map((list) => list.length), [2, 2]);
  assert.ok(times.flat().every((time) => time >= 24));
  let turns = 0;
  const stopped = await measureInTurn(runs, 2, () => ++turns <= 9);
  assert.deepEqual(stopped.map((list) => list.length), [1, 1]);
});

test('logs and names of runtimes', () => {
  const log = ['] Node(s) placed on [CPUExecutionProvider]. 1', 'VerifyEachNode]   Round (one)',
    '] Node(s) placed on [WebGpuExecutionProvider]. 1', 'VerifyEachNode]   Conv (two)'];
  assert.deepEqual(nodesOnCpu(log), ['Round']);
  assert.deepEqual(ordered(['b', 'a'], ['a', 'b']), [1, 0]);
  assert.deepEqual(ordered(['output_0', 'output_10', 'output_2'], [undefined]), [0, 2, 1]);
});
