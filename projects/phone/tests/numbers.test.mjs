// Values of NumPy and torchvision are in the file that EXPECTED names; see test_phone.py.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import test from 'node:test';
import { labelMap, pasteMask, readBoxes, suppress } from '../page/decode.js';
import { nodesOnCpu, ordered } from '../page/engines.js';
import { deviation, largestDeviation, measureInTurn, summarize } from '../page/measure.js';
import { fit } from '../page/prepare.js';

const expected = JSON.parse(readFileSync(process.env.EXPECTED));
const close = (a, b) => assert.ok(Math.abs(a - b) <= 1e-12 * Math.abs(b), `${a} is not ${b}`);

test('statistics', () => {
  const { q1, ms, q3 } = summarize(expected.values[0], expected.values[1]);
  [q1, ms, q3].forEach((value, index) => close(value, expected.quantiles[index]));
  close(deviation([...expected.values].reverse(), expected.values), expected.deviation);
  const engines = ['litert-wasm', 'litert-webgpu-float16', 'litert-wasm-int8'];
  assert.deepEqual(engines.map(largestDeviation), [1e-3, 1e-2, 1e-2]);
  assert.ok(Number.isNaN(deviation([[1, NaN]], [[1, 2]])));
  assert.ok(!(deviation([[1]], [[1, 2]]) < 1) && !(deviation([[1, 2, 3]], [[1, 2]]) < 1));
});

test('overlapping boxes', () => {
  const boxes = expected.boxes.map(([box, score, label]) => ({ box, score, label }));
  assert.deepEqual(suppress(boxes, 0.4, 1000).map(({ box }) => box), expected.kept);
  assert.equal(suppress(boxes, 0.4, 3).length, 3);
});

test('boxes of decoded files', () => {
  const nms = { iou_threshold: 0.5 };
  const test_cfg = { score_thr: 0.2, nms, min_bbox_size: 0, max_per_img: 9 };
  let image = { width: 64, height: 32, top: 0, left: 0 };
  const read = (format, scale, boxes, scores, labels) => readBoxes(
    Object.fromEntries([boxes, scores, labels].map((values, i) => ['bsl'[i], { values }])),
    { test_cfg, outputs: [{ name: 'b', box_format: format, scale }, { name: 's' },
      ...(labels ? [{ name: 'l' }] : [])] }, image);
  const first = { box: [24, 8, 40, 24], score: 0.75, label: 1 };
  const rows = [...first.box, 0, 0, 0, 0];
  assert.deepEqual(read('xyxy', [1, 1, 1, 1], rows, [0.75, 0], [1, 0]), [first]);
  const shares = [0.5, 0.5, 0.25, 0.5, 0.5, 0.5, 0.25, 0.5]; // of two boxes, the same
  assert.deepEqual(read('cxcywh', [64, 32, 64, 32], shares, [0, 0.75, 0.1, 0.5]), [first]);
  image = { width: 20, height: 20, top: 6, left: 22 };
  const moved = { ...first, box: [2, 2, 18, 18] };
  const outside = [0.75, 0.75]; // scores: in the padding there are no objects
  assert.deepEqual(read('xyxy', [1, 1, 1, 1], rows, outside, [1, 0]), [moved]);
});

test('masks', () => {
  const [values, small] = [Float32Array.from(expected.masks), { width: 40, height: 30 }];
  const names = ['boxes', 'scores', 'labels', 'masks'];
  const maps = { boxes: expected.places.flat(), scores: [0.9, 0.8], labels: [1, 1] };
  const outputs = names.map((name) => ({ name, kind: name }));
  Object.assign(outputs[0], { box_format: 'xyxy', scale: [1, 1, 1, 1] });
  const about = { outputs, test_cfg: { nms: { iou_threshold: 0.5 }, max_per_img: 9 } };
  const results = Object.fromEntries(names.map((name) => [name, { values: maps[name] }]));
  results.masks = { values, shape: [1, 2, 7, 5] };
  const boxes = readBoxes(results, about, { ...small, top: 0, left: 0 });
  const pasted = boxes.map(({ mask }) => [...pasteMask(mask, small, 0.5)]);
  assert.deepEqual(pasted, expected.pasted);
});

test('resizing', () => {
  const image = { data: Uint8ClampedArray.from(expected.noise), width: 61, height: 37 };
  for (const [backend, interpolation, more, shape, pixels] of expected.resized) {
    const resize = { backend, interpolation, ...more };
    const { data, width, height } = fit(image, { shape: [1, 3, 21, 35], layout: 'NCHW', resize });
    assert.deepEqual([height, width], shape.slice(0, 2));
    const found = data.filter((_, i) => i % 4 < 3);
    const apart = pixels.map((value, i) => Math.abs(value - found[i]));
    assert.ok(Math.max(...apart) <= 1, `${backend} ${interpolation} ${Math.max(...apart)}`);
  }
});

test('maps of classes', () => {
  const logits = Float32Array.from(expected.logits);
  const several = labelMap(logits, [1, 5, 4, 6], 16, 24);
  assert.deepEqual([...several], expected.maps[0]);
  const two = labelMap(logits.subarray(0, 24), [1, 1, 4, 6], 16, 24);
  assert.deepEqual([...two], expected.maps[1].map(Number));
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
  const broken = () => Promise.reject(new Error('broken'));
  const left = await measureInTurn([runs[0], broken, runs[1]], 2, () => true);
  assert.deepEqual(left.map((list) => list.length), [2, 0, 2]);
  let turns = 0;
  const stopped = await measureInTurn(runs, 2, () => ++turns <= 9);
  assert.deepEqual(stopped.map((list) => list.length), [1, 1]);
});

test('logs and names of runtimes', () => {
  const log = ['] Node(s) placed on [CPUExecutionProvider]. 1', 'VerifyEachNode]   Round (one)',
    '] Node(s) placed on [WebGpuExecutionProvider]. 1', 'VerifyEachNode]   Conv (two)'];
  assert.deepEqual(nodesOnCpu(log), ['Round']);
  assert.deepEqual(ordered(['b', 'a'], ['a', 'b']), [1, 0]);
  assert.deepEqual(ordered(['output_0', 'output_10', 'output_2'], [undefined], /\d+$/), [0, 2, 1]);
  assert.deepEqual(ordered(['score1', 'score2', 'box1'], [undefined]), [0, 1, 2]);
});
