// What one sees: the files, the measurement with its table, and what a network sees.

import { channelsFirst } from './decode.js';
import { make, show } from './draw.js';
import { findBackends, load, open } from './engines.js';
import { deviation, largestDeviation, measureInTurn, quantile, summarize, toRecording } from './measure.js';
import { fit, readPhoto, readPixels, toTensor } from './prepare.js';

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
// Browsers name the page's address, which is secret, where a module cannot be imported.
const folder = new URL('.', location).href;
const plain = (error) => String(error?.message ?? error).replaceAll(folder, '')
  .replace(/\s+/g, ' ').slice(0, 300);
const fixed = (value, digits) => (Number.isFinite(value) ? value.toFixed(digits) : '');
const say = ([name, ms]) => `${name} ${fixed(ms, 1)} ms`;
let served; // the computer's list of files
let device = '';
let looking = null; // what looks at photos: {file, backend, session}
let stopped = false;
let store = {}; // of results that the computer has not confirmed; they outlive the page

/** Say why a file is measured only, if it is. */
function whyNotSeen({ outputs, about: { part, decode, slide, inputs } }) {
  if (!part) return 'It does not describe itself, so it is measured only.';
  if (slide) return 'It is tested on windows, which this page lacks, so it is measured only.';
  if (inputs[0].channels === null) return 'It does not take colours, so it is measured only.';
  const known = part !== 'model' || decode || outputs.length === 1 || outputs[0].kind;
  return known ? '' : 'Its head decodes boxes in a way of its own, so it is measured only.';
}

/** Describe the device and the browser as far as the browser does. */
async function describeDevice() {
  const wanted = ['model', 'platformVersion'];
  const known = await navigator.userAgentData?.getHighEntropyValues(wanted).catch(() => null);
  if (!known) return navigator.userAgent.replace('Mozilla/5.0 ', '').slice(0, 150);
  const { brand, version } = known.brands.filter((one) => !/not.?a.?brand/i.test(one.brand)).at(-1);
  const words = [known.model, `${known.platform} ${known.platformVersion}`, `${brand} ${version}`];
  return words.map((one) => one.trim()).filter(Boolean).join(', ');
}

/** Do a part of the work, and note its milliseconds. */
async function step(notes, name, work) {
  const start = performance.now();
  const result = await work();
  notes[name] = performance.now() - start;
  return result;
}

/** Open a file, run it once on the computer's image, and compare the outputs. */
async function prepareRow(file, backend) {
  const { name, key, runtime, int8, input, outputs, against } = file;
  const engine = `${runtime}-${backend}${int8 ? '-int8' : ''}`;
  const row = { file: name, key, engine, build: '', ms: null, MB: file.bytes / 1e6,
    deviation: null, against, note: '', times: [] };
  const fail = (error) => (row.note = `error: ${plain(error)}`);
  try {
    const bytes = new Uint8Array(await load('files', name));
    const values = new Float32Array(await load('references', name));
    let from = 0;
    const next = ({ shape }) => values.subarray(from, (from += shape.reduce((a, b) => a * b)));
    const [image, ...expected] = [input, ...outputs].map(next);
    const { run, close, ...rest } = await step(row, 'load', () => open(file, bytes, backend));
    Object.assign(row, { close, ...rest });
    const found = await step(row, 'first', () => run(image, input.shape));
    row.deviation = deviation(found, expected);
    row.run = () => run(image, input.shape).catch((error) => Promise.reject(fail(error)));
  } catch (error) {
    fail(error);
    row.close?.();
  }
  return row;
}

/** Measure all files by all chosen backends, then show, keep and send the results. */
async function measure() {
  const chosen = Array.from(document.querySelectorAll('#backends :checked'), (box) => box.value);
  const rounds = Math.floor($('rounds').valueAsNumber);
  if (!chosen.length || !(rounds >= 1)) throw new Error('choose what computes, and rounds');
  stopped = false;
  const rows = [];
  const time = new Date().toLocaleString('sv').replace(/[-:]/g, '').replace(' ', '-');
  const keep = () => { // what there is, in case that the browser ends the page
    const results = { time, device, recording: toRecording(served, device, rounds, rows) };
    if (rows.some(({ times }) => times.length)) store[`mmcare ${time}`] = JSON.stringify(results);
  };
  for (const [index, backend] of chosen.entries()) {
    const able = [];
    for (const file of served.files) {
      if (stopped) break;
      text('status', `opening ${file.name}, ${backend}`);
      rows.push(await prepareRow(file, backend));
      keep();
      if (rows.at(-1).run) able.push(rows.at(-1));
    }
    text('status', `measuring ${able.length} files, ${backend}`);
    const times = await measureInTurn(able.map(({ run }) => run), rounds, (done) => {
      $('progress').value = (index + done) / chosen.length;
      return !stopped;
    });
    const first = times[able.findIndex(({ file }) => file === served.files[0].name)] ?? [];
    for (const [place, row] of able.entries()) {
      row.times = times[place];
      if (row.times.length) Object.assign(row, summarize(row.times, first));
      row.close();
    }
    showResults(rows, rounds);
    if (stopped) break;
    keep();
  }
  $('progress').value = 1;
  if (stopped) return text('status', 'stopped: only engines that were finished are sent');
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
  const kept = Object.entries(store).filter(([name]) => name.startsWith('mmcare '));
  const waiting = $('stop').disabled ? kept : []; // not between rounds
  let problem = '';
  for (const [name, body] of waiting) {
    const sent = fetch('results', { method: 'POST', body }).then((answer) => answer.json());
    const { written, error } = await sent.catch(() => ({ error: 'The computer does not answer.' }));
    if (written) delete store[name];
    else problem = error ?? 'The computer does not confirm.';
  }
  if (problem) text('sent', `${problem} The results stay here.`);
  else if (waiting.length) text('sent', 'Sent to the computer.');
  setTimeout(send, 3000);
}

/** Fill the table, a row for each file and engine. */
function showResults(rows, rounds) {
  const heads = Object.keys(COLUMNS);
  const cells = rows.map((row) => heads.map((name) => COLUMNS[name](row)));
  const line = (tag, list, attributes) => make('tr', list.map((words, i) =>
    make(tag, words, { 'data-head': heads[i] })), attributes);
  $('results').tHead.replaceChildren(line('th', heads));
  $('results').tBodies[0].replaceChildren(...rows.map((row, index) => line('td', cells[index], {
    'data-name': row.file, 'data-engine': row.engine,
    'data-median': row.ms ?? '', 'data-deviation': row.deviation ?? '',
    class: row.ms && row.deviation <= largestDeviation(row.engine) ? '' : 'wrong',
  })));
  $('results').hidden = $('copy').hidden = false;
  $('copy').onclick = async () => {
    const about = `${device}; ${served.shape.join('x')}, ${rounds} rounds`;
    const rows = [heads, heads.map(() => '---'), ...cells].map((row) => `| ${row.join(' | ')} |`);
    const words = [about, '', ...rows].join('\n');
    const done = await navigator.clipboard?.writeText(words).then(() => true, () => false);
    text('sent', done ? 'Copied.' : 'This browser does not let the page copy.');
  };
}

/** Open the chosen file, if it is wanted and can look; otherwise say why not. */
async function choose(steps, wanted = true) {
  const file = served.files.find(({ name }) => name === $('model').value);
  const backend = $('backend').value;
  [$('least').hidden, $('seen').hidden] = [true, true];
  ['legend', 'steps', 'rate'].forEach((id) => text(id, ''));
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
    show(file, Object.fromEntries(named), input.resize?.crop || input.resize?.share ? small : image, small);
  });
}

/** Show a photo as the chosen file sees it. */
async function see() {
  const [[photo], steps] = [$('photo').files, {}];
  if (!(await choose(steps, Boolean(photo)))) return;
  const image = await step(steps, 'decoding', () => readPhoto(photo));
  await look(() => image, steps);
  text('steps', Object.entries(steps).map(say).join(', '));
  text('status', 'done');
}

/** Wait for a frame of the camera, which has no more if it was stopped. */
function nextFrame(video) {
  const wait = video.requestVideoFrameCallback?.bind(video) ?? requestAnimationFrame;
  return Promise.race([new Promise(wait), new Promise((resolve) => setTimeout(resolve, 500))]);
}

/** Show what the phone's rear camera sees, frame after frame, until it is stopped. */
async function live() {
  const [video, recent] = [$('camera'), []];
  const wanted = { facingMode: 'environment', width: { ideal: Math.max(640, ...served.shape) } };
  stopped = false;
  if (!(await choose({}))) return;
  text('live', 'Stop');
  try {
    if (!navigator.mediaDevices) throw new Error('the camera needs HTTPS or a tunnel');
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: wanted });
    video.play().catch(halt);
    for (let [frames, before] = [0, performance.now()]; !stopped; ) {
      await nextFrame(video);
      if (stopped || !video.videoWidth) continue;
      const steps = {};
      await look(() => readPixels(video, video.videoWidth, video.videoHeight), steps);
      recent.push({ ...steps, all: performance.now() - before });
      before += recent.at(-1).all;
      if (recent.length > 30) recent.shift();
      const median = (name) => quantile(recent.map((one) => one[name]), 0.5);
      const shares = Object.keys(steps).map((name) => say([name, median(name)]));
      const fps = 1000 / median('all');
      text('rate', [`${fixed(fps, 1)} frames per second`, ...shares].join(', '));
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
  if (navigator.cookieEnabled) store = localStorage; // or the results stay as long as the page
  await globalThis.caches?.delete('mmcare').catch(() => null); // of an older page
  text('device', (device = await describeDevice()));
  served = JSON.parse(new TextDecoder().decode(await load('files.json')));
  // Only serve.py takes results; other hosts may answer anything.
  const taken = await fetch('results').then((answer) => answer.json()).catch(() => null);
  served.static = !taken?.taken;
  const backends = await findBackends(served.files.map(({ runtime }) => runtime));
  for (const { name, label, missing } of backends) {
    const box = make('input', '', { type: 'checkbox', value: name });
    [box.disabled, box.checked] = [Boolean(missing), name === 'wasm'];
    const words = ` ${label}${missing ? `: ${missing}` : ''}`;
    $('backends').append(make('label', [box, words], { class: missing ? 'missing' : '' }));
    if (!missing) $('backend').append(make('option', label, { value: name }));
  }
  for (const file of served.files) {
    const { name, bytes, against } = file;
    const size = `${fixed(bytes / 1e6, 1)} MB, ${served.shape.join('x')}`;
    file.why = whyNotSeen(file);
    $('files').append(make('li', `${name} (${size}), compared with ${against}. ${file.why}`));
    $('model').append(make('option', name, { value: name }));
  }
  $('measure').onclick = () => busily(measure);
  $('stop').onclick = halt;
  onpagehide = () => [halt(), globalThis.caches?.delete('mmcare')]; // nothing stays on the phone
  $('live').onclick = () => ($('stop').disabled ? busily(live) : halt());
  document.onvisibilitychange = () => document.hidden && $('camera').srcObject && halt();
  ['photo', 'model', 'backend'].forEach((id) => ($(id).onchange = () => busily(see)));
  $('measure').disabled = $('live').disabled = false;
  text('status', 'ready');
  if (served.static) text('sent', 'No computer gets the results of this page: copy them.');
  else send();
}

begin().catch((error) => text('status', `error: ${plain(error)}`));
