// What one sees: the files, the measurement with its table, and a photo as a network sees it.

import { channelsFirst, decodeBoxes, labelMap, liveliest, softmax } from './decode.js';
import { findBackends, open } from './engines.js';
import { deviation, measureInTurn, summarize, toRecording } from './measure.js';
import { crop, fit, readPhoto, toTensor } from './prepare.js';

const LARGEST_DEVIATION = 1e-3;
const LARGEST_PICTURE = 1024; // pixels of its longer side
const COLUMNS = {
  file: (row) => row.file,
  engine: (row) => [row.engine, row.note].filter(Boolean).join('; '),
  ms: (row) => fixed(row.ms, 1),
  quartiles: (row) => (row.ms ? `${fixed(row.q1, 1)}–${fixed(row.q3, 1)}` : ''),
  ratio: (row) => fixed(row.ratio, 2),
  deviation: (row) => row.deviation?.toExponential(1) ?? '',
  'first, ms': (row) => fixed(row.first, 1),
  'loading, ms': (row) => fixed(row.load, 0),
  MB: (row) => fixed(row.MB, 1),
};
const $ = (id) => document.getElementById(id);
const text = (id, words) => ($(id).textContent = words);
const plain = (error) => String(error?.message ?? error).replace(/\s+/g, ' ').slice(0, 300);
const fixed = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : '');
let served; // the computer's list of files
let device = '';
let looking = null; // the session that looks at photos: {key, session}
let redraw = null; // draws the photo's boxes
let [stopped, sending] = [false, false];
let kept = null; // results that could not be stored

/** Make an element with a text and attributes. */
function make(tag, words = '', attributes = {}) {
  const element = Object.assign(document.createElement(tag), { textContent: words });
  Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
  return element;
}

/** Give the results that were not sent; with an argument, keep these. They outlive the page. */
function unsent(results = kept) {
  try {
    if (results) localStorage.setItem('mmcare-unsent', JSON.stringify(results));
    kept = null;
    return JSON.parse(localStorage.getItem('mmcare-unsent')) ?? [];
  } catch {
    return (kept = results) ?? []; // some browsers store nothing in private windows
  }
}

async function load(...path) {
  const answer = await fetch(path.map(encodeURIComponent).join('/')).catch(() => null);
  if (!answer?.ok) throw new Error(`${path.at(-1)} cannot be loaded: is tools/phone.py running?`);
  return answer.arrayBuffer();
}

/** Say why a file is measured only, if it is. */
function whyNotSeen({ outputs, report: { part, decode } }) {
  if (!part) return 'No report (.json) next to it names it, so it is measured only.';
  if (part !== 'model' || decode || outputs.length === 1) return '';
  return 'Its head decodes boxes in a way of its own, so it is measured only.';
}

/** Describe the device and the browser as far as the browser does. */
async function describeDevice() {
  const wanted = ['model', 'platformVersion'];
  const known = await navigator.userAgentData?.getHighEntropyValues(wanted).catch(() => null);
  if (!known) return navigator.userAgent.replace('Mozilla/5.0 ', '').slice(0, 150);
  const { brand, version } = known.brands.filter((one) => !/not.?a.?brand/i.test(one.brand)).at(-1);
  const platform = `${known.platform} ${known.platformVersion}`.trim();
  return [known.model, platform, `${brand} ${version}`].filter(Boolean).join(', ');
}

/** Open a file, run it once on the computer's image, and compare the outputs. */
async function prepareRow(file, backend) {
  const { name, key, runtime, int8, input, against } = file;
  const engine = `${runtime}-${backend}${int8 ? '-int8' : ''}`;
  const row = { file: name, key, engine, ms: null, MB: file.bytes / 1e6, deviation: null,
    against, note: '', times: [] };
  const fail = (error) => (row.note = `error: ${plain(error)}`);
  try {
    const bytes = new Uint8Array(await load('files', name));
    const values = new Float32Array(await load('references', name));
    const size = ({ shape }) => shape.reduce((a, b) => a * b);
    let from = size(input);
    const image = values.subarray(0, from);
    let start = performance.now();
    const session = await open(file, bytes, backend);
    row.close = () => session.close();
    [row.load, row.note] = [performance.now() - start, session.note ?? ''];
    start = performance.now();
    const found = await session.run(image, input.shape);
    row.first = performance.now() - start;
    const expected = file.outputs.map((one) => values.subarray(from, (from += size(one))));
    row.deviation = deviation(found, expected);
    row.run = () => session.run(image, input.shape).catch((error) => Promise.reject(fail(error)));
  } catch (error) {
    fail(error);
    row.close?.();
  }
  return row;
}

/** Measure all files by all chosen backends, then show, keep and send the results. */
async function measure() {
  const boxes = document.querySelectorAll('#backends input:checked');
  const chosen = [...boxes].map(({ value }) => value);
  const rounds = Math.floor($('rounds').valueAsNumber);
  if (!chosen.length || !(rounds >= 1)) throw new Error('choose what computes, and rounds');
  stopped = false;
  const rows = [];
  for (const [index, backend] of chosen.entries()) {
    const opened = [];
    for (const file of served.files) {
      if (stopped || (backend === 'webnn' && file.runtime !== 'litert')) continue;
      text('status', `opening ${file.name}, ${backend}`);
      opened.push(await prepareRow(file, backend));
    }
    rows.push(...opened);
    const able = opened.filter(({ run }) => run);
    text('status', `measuring ${able.length} files, ${backend}`);
    const times = await measureInTurn(able.map(({ run }) => run), rounds, (done) => {
      $('progress').value = (index + done) / chosen.length;
      return !stopped;
    }).catch(() => able.map((row) => ((row.note ||= 'not measured: another one failed'), [])));
    able.forEach((row, i) => (row.times = times[i]));
    const first = able.find(({ file }) => file === served.files[0].name)?.times ?? [];
    able.forEach((row) => row.times.length && Object.assign(row, summarize(row.times, first)));
    able.forEach((row) => row.close());
    showResults(rows, rounds);
  }
  $('progress').value = 1;
  if (stopped) return text('status', 'stopped: the table has whole rounds, nothing is sent');
  if (rows.some(({ times }) => times.length)) {
    const time = new Date().toLocaleString('sv').replace(/[-:]/g, '').replace(' ', '-');
    const recording = toRecording(served, device, rounds, rows);
    unsent([...unsent(), { time, device, recording }]);
  }
  const failed = rows.find(({ note }) => note.startsWith('error'));
  text('status', failed ? `${failed.note} (${failed.file}, ${failed.engine})` : 'done');
}

/** Do something with the screen on and no second start; say on the page what went wrong. */
async function busily(work) {
  const enable = (free) => ['measure', 'photo', 'model', 'backend', 'stop'].forEach((id) =>
    ($(id).disabled = (id === 'stop') === free));
  let lock = null;
  const wake = async () => (lock = await navigator.wakeLock?.request('screen').catch(() => null));
  document.addEventListener('visibilitychange', wake); // a hidden page loses its lock
  enable(false);
  wake();
  await work().catch((error) => text('status', `error: ${plain(error)}`));
  document.removeEventListener('visibilitychange', wake);
  lock?.release();
  enable(true);
}

/** Send what the computer has not got yet; it stays here while the computer is away. */
async function send() {
  if (!$('stop').disabled || sending || served.static) return; // not between rounds
  sending = true;
  for (const results of unsent()) {
    const body = JSON.stringify(results);
    const answer = await fetch('results', { method: 'POST', body }).catch(() => null);
    const settled = [200, 400, 413].includes(answer?.status);
    const lost = 'The computer does not answer. The results stay here until it does.';
    text('sent', settled ? (await answer.text()) || 'Sent to the computer.' : lost);
    if (!settled) break;
    unsent(unsent().filter(({ time }) => time !== results.time));
  }
  sending = false;
}

/** Fill the table, a row for each file and engine. */
function showResults(rows, rounds) {
  const heads = Object.keys(COLUMNS);
  const cells = rows.map((row) => heads.map((name) => COLUMNS[name](row)));
  const line = (tag, list, attributes = {}) => {
    const element = make('tr', '', attributes);
    element.append(...list.map((words, i) => make(tag, words, { 'data-head': heads[i] })));
    return element;
  };
  $('results').tHead.replaceChildren(line('th', heads));
  $('results').tBodies[0].replaceChildren(...rows.map((row, index) => line('td', cells[index], {
    'data-name': row.file, 'data-engine': row.engine,
    'data-median': row.ms ?? '', 'data-deviation': row.deviation ?? '',
    class: row.ms && row.deviation <= LARGEST_DEVIATION ? '' : 'wrong',
  })));
  $('results').hidden = $('copy').hidden = false;
  $('copy').onclick = async () => {
    const about = `${device}; ${served.shape.join('x')}, ${rounds} rounds`;
    const table = [heads, heads.map(() => '---'), ...cells].map((list) => `| ${list.join(' | ')} |`)
      .join('\n');
    const copied = navigator.clipboard?.writeText(`${about}\n\n${table}`);
    const done = await copied?.then(() => true, () => false);
    text('sent', done ? 'Copied.' : 'This browser does not let the page copy.');
  };
}

/** Show a photo as the chosen file sees it, and the milliseconds of each step. */
async function see() {
  const [photo] = $('photo').files;
  const file = served.files.find(({ name }) => name === $('model').value);
  const backend = $('backend').value;
  redraw = null;
  [$('least').hidden, $('seen').hidden] = [true, true];
  ['legend', 'steps'].forEach((id) => $(id).replaceChildren());
  text('why', file.why);
  if (!photo || file.why) return;
  text('status', 'looking');
  const steps = [];
  const step = async (name, work) => {
    const start = performance.now();
    const result = await work();
    steps.push(`${name} ${(performance.now() - start).toFixed(1)} ms`);
    return result;
  };
  const image = await step('decoding', () => readPhoto(photo));
  if (looking?.key !== file.name + backend) {
    looking?.session.close();
    looking = null;
    const bytes = new Uint8Array(await load('files', file.name));
    const session = await step('loading', () => open(file, bytes, backend));
    looking = { key: file.name + backend, session };
  }
  const [height, width] = served.shape;
  const classifies = file.report.part === 'model' && file.outputs[0].shape.length === 2;
  const [small, tensor] = await step('preparation', () => {
    const resized = (classifies ? crop : fit)(image, width, height);
    return [resized, toTensor(resized, file.input)];
  });
  const values = await step('network', () => looking.session.run(tensor, file.input.shape));
  await step('showing', () => {
    const named = file.outputs.map((one, i) => [one.name, channelsFirst(values[i], one)]);
    show(file.report, Object.fromEntries(named), classifies ? small : image, small);
  });
  text('steps', steps.join(', '));
  text('status', 'done');
}

/** Make RGBA pixels an image that can be drawn. */
function drawable({ data, width, height }) {
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext('2d').putImageData(new ImageData(data, width, height), 0, 0);
  return canvas;
}

/** Draw the photo, with room below it: a share of its height. */
function drawPhoto(image, room = 0) {
  const canvas = $('seen');
  const scale = Math.min(LARGEST_PICTURE / Math.max(image.width, image.height), 1);
  const [width, height] = [image.width, image.height].map((side) => Math.round(side * scale));
  [canvas.width, canvas.height, canvas.hidden] = [width, Math.round(height * (1 + room)), false];
  const context = canvas.getContext('2d');
  context.drawImage(drawable(image), 0, 0, width, height);
  context.imageSmoothingEnabled = false; // of what follows
  return { context, width, height };
}

/** List below the picture: [words, colour, share]. */
function legend(lines) {
  $('legend').replaceChildren(...lines.map(([words, colour, share]) => {
    const line = make('li', words);
    if (colour) line.style.setProperty('--swatch', `rgb(${colour.join(' ')})`);
    if (share !== undefined) line.append(make('meter', '', { value: share }));
    return line;
  }));
}

/** Show what outputs mean: boxes, classes, a map of classes, or else maps of numbers. */
function show({ part, decode, classes, palette }, maps, image, small) {
  const [{ values, shape }] = Object.values(maps);
  const name = (label) => classes?.[label] ?? `class ${label}`;
  const own = (label) => [61, 103, 149].map((step) => 30 + ((step * (label + 1)) % 200));
  const colour = (label) => palette?.[label] ?? own(label);
  const line = (label, share) => [`${name(label)}: ${(100 * share).toFixed(1)} %`, colour(label)];
  if (part === 'model' && decode) {
    const boxes = decodeBoxes(maps, decode, [small.width, small.height]);
    $('least').hidden = false;
    redraw = () => drawBoxes(boxes, image, small, name, colour);
    redraw();
  } else if (part === 'model' && shape.length === 2) {
    drawPhoto(small);
    const best = [...softmax(values).entries()].sort((a, b) => b[1] - a[1]).slice(0, 5);
    legend(best.map(([label, share]) => [...line(label, share), share]));
  } else if (part === 'model') {
    const labels = labelMap(values, shape, ...served.shape);
    const shares = drawMap(labels, image, small, colour).sort((a, b) => b[1] - a[1]);
    legend(shares.map((pair) => line(...pair)));
  } else {
    drawMaps(Object.entries(maps), image, small);
  }
}

/** Draw boxes with names over the photo: those with at least the chosen score. */
function drawBoxes(boxes, image, small, name, colour) {
  const { context, width } = drawPhoto(image);
  const certain = boxes.filter(({ score }) => score >= $('threshold').valueAsNumber);
  context.lineWidth = Math.max(2, width / 250);
  context.font = `${Math.max(12, width / 40)}px system-ui`;
  for (const { box, score, label } of certain) {
    const [x1, y1, x2, y2] = box.map((side) => (side * width) / small.width);
    const words = `${name(label)} ${score.toFixed(2)}`;
    const { width: long, fontBoundingBoxAscent: above } = context.measureText(words);
    context.strokeStyle = context.fillStyle = `rgb(${colour(label).join(' ')})`;
    context.strokeRect(x1, y1, x2 - x1, y2 - y1);
    context.fillRect(x1, Math.max(y1 - above - 4, 0), long + 6, above + 4);
    context.fillStyle = 'white';
    context.fillText(words, x1 + 3, Math.max(y1 - 4, above));
  }
  const labels = certain.map(({ label }) => label);
  const lines = [...new Set(labels)].map((label) =>
    [`${name(label)}: ${labels.filter((one) => one === label).length}`, colour(label)]);
  legend(lines.length ? lines : [['no box has such a score']]);
}

/** Draw a map of classes over the photo, and give the share of each class. */
function drawMap(labels, image, small, colour) {
  const { context, width, height } = drawPhoto(image);
  const data = new Uint8ClampedArray(small.width * small.height * 4);
  const shares = new Map();
  for (let i = 0; i < data.length / 4; i++) {
    const label = labels[Math.floor(i / small.width) * served.shape[1] + (i % small.width)];
    data.set([...colour(label), 140], i * 4);
    shares.set(label, (shares.get(label) ?? 0) + 4 / data.length);
  }
  context.drawImage(drawable({ ...small, data }), 0, 0, width, height);
  return [...shares];
}

/** Draw below the photo one channel of each map. */
function drawMaps(maps, image, small) {
  const { context, width, height } = drawPhoto(image, Math.ceil(maps.length / 2) / 2);
  legend(maps.map(([name, { values, shape }], index) => {
    const { channel, data, width: columns, height: rows } = liveliest(values, shape);
    const [inHeight, inWidth] = served.shape; // the photo fills a part of it
    const part = [(columns * small.width) / inWidth, (rows * small.height) / inHeight];
    const place = [(index % 2) * (width / 2), height + Math.floor(index / 2) * (height / 2)];
    const map = drawable({ data, width: columns, height: rows });
    context.drawImage(map, 0, 0, ...part, ...place, width / 2, height / 2);
    return [`${name}: channel ${channel} of ${shape[1]}, ${rows}x${columns}`];
  }));
}

/** Fill the page with what the computer serves and what the browser has. */
async function begin() {
  for (const { name, label, missing } of await findBackends()) {
    const box = make('input', '', { type: 'checkbox', value: name });
    [box.disabled, box.checked] = [Boolean(missing), name === 'wasm'];
    const line = make('label', '', { class: missing ? 'missing' : '' });
    line.append(box, ` ${label}${missing ? `: ${missing}` : ''}`);
    $('backends').append(line);
    if (!missing) $('backend').append(make('option', label, { value: name }));
  }
  text('device', (device = await describeDevice()));
  served = JSON.parse(new TextDecoder().decode(await load('files.json')));
  served.static = !(await fetch('results')).ok; // only tools/phone.py takes them
  for (const file of served.files) {
    const size = `${fixed(file.bytes / 1e6, 1)} MB, ${served.shape.join('x')}`;
    file.why = whyNotSeen(file);
    const words = `${file.name} (${size}), compared with ${file.against}. ${file.why}`;
    $('files').append(make('li', words));
    $('model').append(make('option', file.name, { value: file.name }));
  }
  $('measure').onclick = () => busily(measure).then(send);
  $('stop').onclick = () => (stopped = true);
  ['photo', 'model', 'backend'].forEach((id) => ($(id).onchange = () => busily(see)));
  $('threshold').oninput = () => redraw?.();
  $('measure').disabled = false;
  text('status', 'ready');
  if (served.static) text('sent', 'No computer gets the results of this page: copy them.');
  else setInterval(send, 5000);
}

begin().catch((error) => text('status', `error: ${plain(error)}`));
