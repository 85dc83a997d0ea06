// What one sees: the files, the measurement with its table, and what a network sees.

import { channelsFirst } from './decode.js';
import { clear, make, show } from './draw.js';
import { findBackends, load, open } from './engines.js';
import { deviation, measureInTurn, quantile, summarize, toRecording } from './measure.js';
import { fit, readPhoto, readPixels, toTensor } from './prepare.js';

const LARGEST_DEVIATION = 1e-3;
const FRAMES = 30; // of the camera, whose medians are shown
const COLUMNS = {
  file: (row) => row.file,
  engine: (row) => [row.engine, row.build, row.note].filter(Boolean).join('; '),
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
const list = (steps) =>
  Object.entries(steps).map(([name, ms]) => `${name} ${fixed(ms, 1)} ms`).join(', ');
let served; // the computer's list of files
let backends; // what this browser computes with
let device = '';
let looking = null; // what looks at photos: {file, backend, session}
let [stopped, sending] = [false, false];
let kept = null; // results that could not be stored

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

/** Say why a file is measured only, if it is. */
function whyNotSeen({ outputs, about: { part, decode } }) {
  if (!part) return 'It does not describe itself, so it is measured only.';
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
    row.load = performance.now() - start;
    [row.build, row.note] = [session.build, session.note];
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
  const time = new Date().toLocaleString('sv').replace(/[-:]/g, '').replace(' ', '-');
  const keep = () => { // what there is, in case that the browser ends the page
    const recording = toRecording(served, device, rounds, rows);
    const others = unsent().filter((one) => one.time !== time);
    if (rows.some(({ times }) => times.length)) unsent([...others, { time, device, recording }]);
  };
  for (const [index, backend] of chosen.entries()) {
    const opened = [];
    for (const file of served.files) {
      if (stopped || !backends.get(backend).takes.includes(file.runtime)) continue;
      text('status', `opening ${file.name}, ${backend}`);
      opened.push(await prepareRow(file, backend));
      keep(rows.push(opened.at(-1)));
    }
    const able = opened.filter(({ run }) => run);
    text('status', `measuring ${able.length} files, ${backend}`);
    const times = await measureInTurn(able.map(({ run }) => run), rounds, (done) => {
      $('progress').value = (index + done) / chosen.length;
      return !stopped;
    });
    able.forEach((row, i) => (row.times = times[i]));
    const first = able.find(({ file }) => file === served.files[0].name)?.times ?? [];
    able.forEach((row) => row.times.length && Object.assign(row, summarize(row.times, first)));
    able.forEach((row) => row.close());
    showResults(rows, rounds);
    if (stopped) break;
    keep();
  }
  $('progress').value = 1;
  if (stopped) return text('status', 'stopped: the table has whole rounds, which are not sent');
  const failed = rows.find(({ note }) => note.startsWith('error'));
  text('status', failed ? `${failed.note} (${failed.file}, ${failed.engine})` : 'done');
}

/** Do something with the screen on and no second start; say on the page what went wrong. */
async function busily(work) {
  const enable = (free) => {
    ['measure', 'photo', 'model', 'backend'].forEach((id) => ($(id).disabled = !free));
    [$('stop').disabled, $('live').disabled] = [free, !free && work !== live];
  };
  let lock = Promise.resolve(null);
  const wake = () => (lock = lock.then((old) => old?.release())
    .then(() => navigator.wakeLock?.request('screen')).catch(() => null));
  document.addEventListener('visibilitychange', wake); // a hidden page loses its lock
  enable(false);
  wake();
  const places = work === measure ? ['status'] : ['status', 'why'];
  await work().catch((error) => places.forEach((id) => text(id, `error: ${plain(error)}`)));
  document.removeEventListener('visibilitychange', wake);
  (await lock)?.release();
  enable(true);
}

/** Send what the computer has not confirmed yet; it stays here until then. */
async function send() {
  const waiting = unsent();
  if (!$('stop').disabled || sending || served.static || !waiting.length) return;
  sending = true;
  let problem = '';
  for (const results of waiting) {
    const body = JSON.stringify(results);
    const sent = fetch('results', { method: 'POST', body }).then((answer) => answer.json());
    const { written, error } = await sent.catch(() => ({ error: 'The computer does not answer.' }));
    if (written) unsent(unsent().filter(({ time }) => time !== results.time));
    else problem = error ?? 'The computer does not confirm.';
  }
  text('sent', problem ? `${problem} The results stay here.` : 'Sent to the computer.');
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

/** Do a part of the work, and note its milliseconds. */
async function step(steps, name, work) {
  const start = performance.now();
  const result = await work();
  steps[name] = performance.now() - start;
  return result;
}

/** Open the chosen file, if it is wanted and can look; otherwise say why not. */
async function choose(steps, wanted = true) {
  const file = served.files.find(({ name }) => name === $('model').value);
  const backend = $('backend').value;
  clear();
  ['steps', 'rate'].forEach((id) => text(id, ''));
  text('why', file.why);
  if (!wanted || file.why) return false;
  text('status', 'looking');
  if (looking?.file !== file || looking.backend !== backend) {
    looking?.session.close();
    looking = null;
    const bytes = new Uint8Array(await load('files', file.name));
    const session = await step(steps, 'loading', () => open(file, bytes, backend));
    looking = { file, backend, session };
  }
  return true;
}

/** Show an image as the chosen file sees it. */
async function look(read, steps) {
  const { file, session } = looking;
  const { input, outputs } = file;
  const [image, small, tensor] = await step(steps, 'preparation', () => {
    const image = read();
    const small = fit(image, input);
    return [image, small, toTensor(small, input)];
  });
  const values = await step(steps, 'network', () => session.run(tensor, input.shape));
  await step(steps, 'drawing', () => {
    const named = outputs.map((one, i) => [one.name, channelsFirst(values[i], one)]);
    show(file, Object.fromEntries(named), input.resize?.crop ? small : image, small);
  });
}

/** Show a photo as the chosen file sees it. */
async function see() {
  const [[photo], steps] = [$('photo').files, {}];
  if (!(await choose(steps, photo))) return;
  const image = await step(steps, 'decoding', () => readPhoto(photo));
  await look(() => image, steps);
  text('steps', list(steps));
  text('status', 'done');
}

/** Wait for a frame of the camera, which has no more if it was stopped. */
function nextFrame(video) {
  const wait = video.requestVideoFrameCallback?.bind(video) ?? requestAnimationFrame;
  return Promise.race([new Promise(wait), new Promise((resolve) => setTimeout(resolve, 500))]);
}

/** Open the camera at the phone's back. */
async function openCamera() {
  const video = { facingMode: 'environment', width: { ideal: Math.max(...served.shape) } };
  if (!navigator.mediaDevices) throw new Error('the camera needs HTTPS or a tunnel');
  return navigator.mediaDevices.getUserMedia({ video }).catch((error) => {
    throw new Error(`the camera cannot be used: ${plain(error)}`);
  });
}

/** Show what the camera sees, frame after frame, until it is stopped. */
async function live() {
  const [video, recent] = [$('camera'), []];
  stopped = false;
  if (!(await choose({}))) return;
  text('live', 'Stop');
  try {
    video.srcObject = await openCamera();
    video.play().catch(halt);
    for (let [frames, before] = [0, performance.now()]; !stopped; ) {
      await nextFrame(video);
      if (stopped || !video.videoWidth) continue;
      const steps = {};
      await look(() => readPixels(video, video.videoWidth, video.videoHeight), steps);
      recent.push({ ...steps, all: performance.now() - before });
      before += recent.at(-1).all;
      if (recent.length > FRAMES) recent.shift();
      const median = (name) => quantile(recent.map((one) => one[name]), 0.5);
      const medians = Object.keys(steps).map((name) => [name, median(name)]);
      const fps = 1000 / median('all');
      text('rate', `${fixed(fps, 1)} frames per second: ${list(Object.fromEntries(medians))}`);
      Object.assign($('rate').dataset, { fps, frames: (frames += 1) });
    }
    text('status', 'done');
  } finally {
    halt();
    video.srcObject = null;
    text('live', 'Live');
  }
}

/** End the rounds, or the camera. */
function halt() {
  stopped = true;
  $('camera').srcObject?.getTracks().forEach((track) => track.stop());
}

/** Fill the page with what the computer serves and what the browser has. */
async function begin() {
  await globalThis.caches?.delete('mmcare').catch(() => null); // of an older page
  text('device', (device = await describeDevice()));
  served = JSON.parse(new TextDecoder().decode(await load('files.json')));
  // Only tools/phone.py takes results; other hosts may answer anything.
  const taken = await fetch('results').then((answer) => answer.json()).catch(() => null);
  served.static = !taken?.taken;
  const found = await findBackends(served.files.map(({ runtime }) => runtime));
  backends = new Map(found.map((one) => [one.name, one]));
  for (const { name, label, missing } of found) {
    const box = make('input', '', { type: 'checkbox', value: name });
    [box.disabled, box.checked] = [Boolean(missing), name === 'wasm'];
    const line = make('label', '', { class: missing ? 'missing' : '' });
    line.append(box, ` ${label}${missing ? `: ${missing}` : ''}`);
    $('backends').append(line);
    if (!missing) $('backend').append(make('option', label, { value: name }));
  }
  for (const file of served.files) {
    const size = `${fixed(file.bytes / 1e6, 1)} MB, ${served.shape.join('x')}`;
    file.why = whyNotSeen(file);
    const words = `${file.name} (${size}), compared with ${file.against}. ${file.why}`;
    $('files').append(make('li', words));
    $('model').append(make('option', file.name, { value: file.name }));
  }
  $('measure').onclick = () => busily(measure).then(send);
  $('stop').onclick = onpagehide = halt;
  $('live').onclick = () => ($('stop').disabled ? busily(live) : halt());
  document.onvisibilitychange = () => document.hidden && $('camera').srcObject && halt();
  ['photo', 'model', 'backend'].forEach((id) => ($(id).onchange = () => busily(see)));
  $('measure').disabled = $('live').disabled = false;
  text('status', 'ready');
  if (served.static) text('sent', 'No computer gets the results of this page: copy them.');
  else setInterval(send, 5000);
}

begin().catch((error) => text('status', `error: ${plain(error)}`));
