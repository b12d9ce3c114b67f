import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig } from 'vite'

// Written into the Python package, which ships the page as it stands there.
const page = '../src/lol/studio/page'

export default defineConfig({
  plugins: [svelte()],
  base: './',
  build: { outDir: page, emptyOutDir: true, assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  // `npm run dev` beside a running `lol studio --port 8010`.
  server: { host: '127.0.0.1', proxy: { '/api': { target: 'http://127.0.0.1:8010', changeOrigin: true } } },
})
